//! Parses `gen:…` from the command line.

use super::failures::{DAY, Failures};
use super::generate::{Recipe, Renewal, Repair};
use everstep_planner::file::time;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

fn micros(what: &str, text: &str) -> Result<u64, String> {
    let found = u64::try_from(time(what, text)?.as_micros()).unwrap_or(u64::MAX);
    if found > 0 && found < 100_000 * DAY {
        Ok(found)
    } else {
        Err(format!("{what} = {text} must be greater than zero and less than 100,000 days"))
    }
}

/// Parses `4h..20h`, `exp:1d` or `lognormal:0.85d:5.5d` (median and mean).
fn repair(text: &str) -> Result<Repair, String> {
    let time = |text: &str| micros("repair", text);
    if let Some(mean) = text.strip_prefix("exp:") {
        return Ok(Repair::Exponential(time(mean)?));
    }
    if let Some((median, mean)) = text.strip_prefix("lognormal:").and_then(|t| t.split_once(':')) {
        let (median, mean) = (time(median)?, time(mean)?);
        return match mean >= median {
            true => Ok(Repair::LogNormal(median, mean)),
            false => Err(format!("repair = {text}: the mean of a log-normal time is not below its median")),
        };
    }
    match text.split_once("..") {
        Some((least, most)) if time(least)? <= time(most)? => Ok(Repair::Between(time(least)?, time(most)?)),
        _ => Err(format!(
            "repair = {text} is invalid; give, for example, 4h..20h, exp:1d or lognormal:0.85d:5.5d (median and mean)"
        )),
    }
}

struct Keys<'t>(BTreeMap<&'t str, &'t str>);

impl<'t> Keys<'t> {
    fn of(spec: &'t str, text: &'t str, known: &[&str]) -> Result<Self, String> {
        let mut found = BTreeMap::new();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("gen:{spec}: {part} is not KEY=VALUE"))?;
            if !known.contains(&key) {
                return Err(format!("gen:{spec}: there is no {key}; there are {}", known.join(", ")));
            }
            found.insert(key, value);
        }
        Ok(Keys(found))
    }

    fn number<T: std::str::FromStr + PartialOrd>(
        &self,
        key: &str,
        usual: T,
        within: RangeInclusive<T>,
    ) -> Result<T, String> {
        let Some(text) = self.0.get(key) else { return Ok(usual) };
        let found = text.parse().ok().filter(|n| within.contains(n));
        found.ok_or_else(|| format!("{key} = {text} is not a valid number"))
    }

    fn time(&self, key: &str, usual: u64) -> Result<u64, String> {
        self.0.get(key).map_or(Ok(usual), |text| micros(key, text))
    }
}

const RENEWAL: [&str; 9] = ["nodes", "days", "mtbf", "others", "repair", "shape", "burst", "domain", "lemons"];

impl Recipe {
    /// Parses what follows `gen:`. `trace` reads the file of a real trace, for `bootstrap`.
    ///
    /// # Errors
    /// If the recipe is unknown, or a key or value is invalid.
    pub fn read(spec: &str, trace: impl Fn(&str) -> Result<Failures, String>) -> Result<Recipe, String> {
        let (name, rest) = spec.split_once(',').unwrap_or((spec, ""));
        match name {
            "trace-a" | "trace-b" if !rest.is_empty() => {
                Err(format!("gen:{name} takes nothing more: it is as published"))
            }
            "trace-a" => Ok(Recipe::TraceA),
            "trace-b" => Ok(Recipe::TraceB),
            "poisson" | "weibull" => {
                let keys = Keys::of(name, rest, &RENEWAL)?;
                let usual = if name == "weibull" { 0.7 } else { 1.0 };
                let (share, times) = match keys.0.get("lemons").map(|t| t.split_once(':')) {
                    None => (0.0, 1.0),
                    Some(pair) => {
                        let read = |t: &str| t.parse::<f64>().ok();
                        let found = pair.and_then(|(a, b)| Some((read(a)?, read(b)?)));
                        let sound = found.filter(|(s, t)| (0.0..=1.0).contains(s) && (1.0..=1000.0).contains(t));
                        sound.ok_or("lemons = SHARE:TIMES, as in 0.1:4: a tenth of the nodes fails 4 times as often")?
                    }
                };
                Ok(Recipe::Renewal(Renewal {
                    nodes: keys.number("nodes", 128, 1..=1 << 20)?,
                    length: (keys.number("days", 90.0, 0.001..=36_500.0)? * DAY as f64) as u64,
                    mtbf: keys.time("mtbf", 260 * DAY)?,
                    shape: keys.number("shape", usual, 0.2..=10.0)?,
                    others: keys.number("others", 3.3, 0.0..=1000.0)?,
                    repair: keys
                        .0
                        .get("repair")
                        .map_or(Ok(Repair::LogNormal(DAY * 17 / 20, DAY * 11 / 2)), |t| repair(t))?,
                    burst: keys.number("burst", 0.0, 0.0..=1.0)?,
                    domain: keys.number("domain", 8, 1..=1 << 20)?,
                    lemons: (share, times),
                }))
            }
            "bootstrap" => {
                let keys = Keys::of(name, rest, &["file", "days", "block"])?;
                let file = keys.0.get("file").ok_or("gen:bootstrap needs file=…: a trace to draw days of")?;
                let of = trace(file)?;
                let length = keys.number("days", of.length as f64 / DAY as f64, 0.001..=36_500.0)?;
                Ok(Recipe::Bootstrap { block: keys.time("block", 14 * DAY)?, length: (length * DAY as f64) as u64, of })
            }
            _ => Err(format!("gen:{name}: there are trace-a, trace-b, poisson, weibull, bootstrap")),
        }
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        match self {
            Recipe::TraceA | Recipe::TraceB => 16,
            Recipe::Renewal(of) => of.nodes,
            Recipe::Bootstrap { of, .. } => of.nodes,
        }
    }
}

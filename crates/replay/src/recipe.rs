//! Parses `gen:…` from the command line.

use super::failures::{DAY, Failures};
use super::generate::{Recipe, Renewal, Repair};
use everstep_planner::file::{QuantityError, time};
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::RangeInclusive;

/// An invalid recipe.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    #[error("gen:{0}: there are trace-a, trace-b, poisson, weibull, bootstrap")]
    Unknown(String),
    #[error("gen:{recipe} takes nothing more: it is as published")]
    TakesNothing { recipe: String },
    #[error("gen:{recipe}: {part} is not KEY=VALUE")]
    NotKeyValue { recipe: String, part: String },
    #[error("gen:{recipe}: there is no {key}; there are {}", known.join(", "))]
    UnknownKey { recipe: String, key: String, known: &'static [&'static str] },
    #[error("{key} = {text} is not a valid number")]
    Number { key: String, text: String },
    #[error(transparent)]
    Time(#[from] QuantityError),
    #[error("{key} = {text} must be greater than zero and less than 100,000 days")]
    TimeRange { key: String, text: String },
    #[error("repair = {0} is invalid; give, for example, 4h..20h, exp:1d or lognormal:0.85d:5.5d (median and mean)")]
    Repair(String),
    #[error("repair = {0}: the mean of a log-normal time is not below its median")]
    RepairMean(String),
    #[error("lemons = SHARE:TIMES, as in 0.1:4: a tenth of the nodes fails 4 times as often")]
    Lemons,
    #[error("gen:bootstrap needs file=…: a trace to draw days of")]
    NoFile,
    /// The trace to draw from cannot be used.
    #[error(transparent)]
    File(Box<dyn Error + Send + Sync>),
}

fn micros(key: &str, text: &str) -> Result<u64, RecipeError> {
    let found = u64::try_from(time(key, text)?.as_micros()).unwrap_or(u64::MAX);
    if found > 0 && found < 100_000 * DAY {
        Ok(found)
    } else {
        Err(RecipeError::TimeRange { key: key.to_owned(), text: text.to_owned() })
    }
}

/// Parses `4h..20h`, `exp:1d` or `lognormal:0.85d:5.5d` (median and mean).
fn repair(text: &str) -> Result<Repair, RecipeError> {
    let time = |text: &str| micros("repair", text);
    if let Some(mean) = text.strip_prefix("exp:") {
        return Ok(Repair::Exponential(time(mean)?));
    }
    if let Some((median, mean)) = text.strip_prefix("lognormal:").and_then(|t| t.split_once(':')) {
        let (median, mean) = (time(median)?, time(mean)?);
        return match mean >= median {
            true => Ok(Repair::LogNormal(median, mean)),
            false => Err(RecipeError::RepairMean(text.to_owned())),
        };
    }
    match text.split_once("..") {
        Some((least, most)) if time(least)? <= time(most)? => Ok(Repair::Between(time(least)?, time(most)?)),
        _ => Err(RecipeError::Repair(text.to_owned())),
    }
}

struct Keys<'t>(BTreeMap<&'t str, &'t str>);

impl<'t> Keys<'t> {
    fn of(recipe: &str, text: &'t str, known: &'static [&'static str]) -> Result<Self, RecipeError> {
        let mut found = BTreeMap::new();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(RecipeError::NotKeyValue { recipe: recipe.to_owned(), part: part.to_owned() });
            };
            if !known.contains(&key) {
                return Err(RecipeError::UnknownKey { recipe: recipe.to_owned(), key: key.to_owned(), known });
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
    ) -> Result<T, RecipeError> {
        let Some(text) = self.0.get(key) else { return Ok(usual) };
        let found = text.parse().ok().filter(|n| within.contains(n));
        found.ok_or_else(|| RecipeError::Number { key: key.to_owned(), text: (*text).to_owned() })
    }

    fn time(&self, key: &str, usual: u64) -> Result<u64, RecipeError> {
        self.0.get(key).map_or(Ok(usual), |text| micros(key, text))
    }
}

const RENEWAL: [&str; 9] = ["nodes", "days", "mtbf", "others", "repair", "shape", "burst", "domain", "lemons"];

impl Recipe {
    /// Parses what follows `gen:`. `trace` reads the file of a real trace, for `bootstrap`.
    ///
    /// # Errors
    /// If the recipe is unknown, a key or value is invalid, or `trace` fails.
    pub fn read<E: Into<Box<dyn Error + Send + Sync>>>(
        spec: &str,
        trace: impl Fn(&str) -> Result<Failures, E>,
    ) -> Result<Recipe, RecipeError> {
        let (name, rest) = spec.split_once(',').unwrap_or((spec, ""));
        match name {
            "trace-a" | "trace-b" if !rest.is_empty() => Err(RecipeError::TakesNothing { recipe: name.to_owned() }),
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
                        sound.ok_or(RecipeError::Lemons)?
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
                let file = keys.0.get("file").ok_or(RecipeError::NoFile)?;
                let of = trace(file).map_err(|e| RecipeError::File(e.into()))?;
                let length = keys.number("days", of.length as f64 / DAY as f64, 0.001..=36_500.0)?;
                Ok(Recipe::Bootstrap { block: keys.time("block", 14 * DAY)?, length: (length * DAY as f64) as u64, of })
            }
            _ => Err(RecipeError::Unknown(name.to_owned())),
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

//! `everstep detect`: finds the deviating machine in samples from a file or a Prometheus server.

use super::{Failure, print_json, runtime, text, write};
use crate::detect::judge::{Score, faults};
use crate::detect::settings::{File, Kind, Ready, models};
use crate::detect::table::{Described, Episode, Read, TableError, series};
use crate::detect::{alarm_chart, csv, parquet, prometheus};
use clap::{Args, Subcommand};
use everstep_core::exit_code::ExitCode;
use everstep_detector::Series;
use everstep_detector::alarms::Alarm;
use everstep_detector::calibrate::calibrated;
use everstep_detector::lstm_vae::Training;
use everstep_detector::models::Models;
use everstep_detector::priority;
use everstep_wire::output::{self, Detected, Evaluated, FIRST};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
pub struct DetectOptions {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Report machines that behave unlike their peers; exit with 1 if there are any
    Run {
        #[command(flatten)]
        from: From,
        #[command(flatten)]
        with: With,
        /// Draw the first reported machine against its peers (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Score the detector against known faults: precision, recall, and delay
    Eval {
        #[command(flatten)]
        from: From,
        #[command(flatten)]
        with: With,
        /// Known faults: machine,start,end[,episode] (CSV)
        #[arg(long, value_name = "FILE")]
        faults: PathBuf,
        /// Draw the first reported machine against its peers (SVG)
        #[arg(long, value_name = "FILE")]
        picture: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Train LSTM-VAE models on normal data; with --models, continue training on a job's own
    /// history
    Train {
        #[command(flatten)]
        from: From,
        /// Models to start from
        #[arg(long, value_name = "FILE")]
        models: Option<PathBuf>,
        /// Known faults, which are excluded from training and determine the order of the metrics:
        /// machine,start,end[,episode] (CSV); without them, all data counts as normal
        #[arg(long, value_name = "FILE")]
        faults: Option<PathBuf>,
        /// Number of times that each window is seen
        #[arg(long, default_value_t = Training::default().epochs)]
        epochs: usize,
        /// Random seed; the same seed gives the same file, bit for bit
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Output file
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
    /// Calibrate the robust detector to a given rate of false alarms, on data without faults
    Calibrate {
        #[command(flatten)]
        from: From,
        #[command(flatten)]
        with: With,
        /// Maximum number of false alarms per 1,000 machine-days
        #[arg(long, value_name = "RATE")]
        false_alarms: f64,
        /// Output file, for use with --detector
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
}

/// The source of the samples.
#[derive(Args, Clone, Debug)]
#[group(skip)]
struct From {
    /// Table with the columns time,machine[,role][,domain][,episode] and metrics, or metric,value
    /// (docs/guide/detector.md)
    #[arg(long, value_name = "FILE")]
    csv: Vec<PathBuf>,
    /// The same table as Parquet
    #[arg(long, value_name = "FILE")]
    parquet: Vec<PathBuf>,
    /// Prometheus server with data of node_exporter, DCGM-exporter or both
    #[arg(long, value_name = "URL")]
    prometheus: Option<String>,
    /// With --prometheus: minutes to look back
    #[arg(long, default_value_t = 15, value_name = "MINUTES")]
    since: u32,
    /// With --prometheus: end of the samples, RFC 3339 or seconds since 1970 [default: now]
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// With --prometheus: seconds between points
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    step: u32,
    /// With --prometheus: range of rates, at least twice the scrape interval
    #[arg(long, default_value = "1m")]
    window: String,
    /// With --prometheus: label matchers to select series, such as job="training"
    #[arg(long, value_name = "MATCHERS", default_value = "", hide_default_value = true)]
    only: String,
    /// With --prometheus: label that names the machine
    #[arg(long, value_name = "LABEL", default_value = "instance")]
    machine_label: String,
    /// With --prometheus: a metric and its query, such as rdma-sent='rate(my_counter[1m])'
    #[arg(long, value_name = "METRIC=QUERY")]
    query: Vec<String>,
    /// Descriptions of metrics: [[metric]] with name, family (host, gpu, link, net, step), worse
    /// (less, more, either) and floor (TOML)
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
}

/// The detector, and its models.
#[derive(Args, Clone, Debug)]
#[group(skip)]
struct With {
    /// Detector: robust, lstm-vae, or a file of settings (TOML)
    #[arg(long, default_value = "robust", value_name = "WHICH")]
    detector: String,
    /// Models for lstm-vae, from everstep detect train [default: those that ship with everstep]
    #[arg(long, value_name = "FILE")]
    models: Option<PathBuf>,
}

impl With {
    fn file(&self) -> Result<File, Failure> {
        let mut file = match self.detector.as_str() {
            "robust" => File::default(),
            "lstm-vae" => File { detector: Kind::LstmVae, ..File::default() },
            path => File::read(Path::new(path)).map_err(|e| Failure::usage(format!("--detector: {e}")))?,
        };
        file.models = self.models.clone().or(file.models);
        Ok(file)
    }

    fn ready(&self) -> Result<Ready, Failure> {
        self.file()?.ready().map_err(Failure::usage)
    }
}

impl From {
    fn read(&self) -> Result<Read, Failure> {
        let described: Described = match &self.metrics {
            Some(path) => toml::from_str(&text(path)?)
                .map_err(|e| Failure::usage(format!("{}: {}", path.display(), e.message())))?,
            None => Described::default(),
        };
        let mut read = Read::default();
        let many = self.csv.len() + self.parquet.len() > 1;
        let open = |path: &PathBuf| {
            fs::File::open(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))
        };
        let mut take = |path: &Path, found: Result<Read, TableError>| -> Result<(), Failure> {
            let mut found = found.map_err(|e| Failure::usage(format!("{}: {e}", path.display())))?;
            for episode in found.episodes.iter_mut().filter(|e| many && e.name.is_empty()) {
                // With several files, each is an episode.
                episode.name = path.file_stem().map_or(String::new(), |n| n.to_string_lossy().into_owned());
            }
            read.episodes.append(&mut found.episodes);
            read.warnings.extend(found.warnings.into_iter().map(|w| format!("{}: {w}", path.display())));
            Ok(())
        };
        for path in &self.csv {
            let file = std::io::BufReader::new(open(path)?);
            take(path, csv::rows(file).and_then(|rows| series(rows, &described)))?;
        }
        for path in &self.parquet {
            let file = open(path)?;
            take(path, parquet::rows(file).and_then(|rows| series(rows, &described)))?;
        }
        if let Some(url) = &self.prometheus {
            let asked = self.asked(url)?;
            let rows = runtime()?.block_on(prometheus::rows(&asked)).map_err(Failure::config)?;
            let found = series(rows.into_iter().map(Ok), &described).map_err(Failure::usage)?;
            read.episodes.extend(found.episodes);
            read.warnings.extend(found.warnings);
        }
        if read.episodes.is_empty() {
            return Err(Failure::usage("no samples; give --csv FILE, --parquet FILE or --prometheus URL"));
        }
        read.warnings.iter().for_each(|warning| crate::say_warning!("{warning}"));
        Ok(read)
    }

    fn asked(&self, url: &str) -> Result<prometheus::Asked, Failure> {
        let end = match &self.until {
            Some(said) => csv::time(said).ok_or_else(|| Failure::usage(format!("--until {said} is not a time")))?,
            None => chrono::Utc::now().timestamp() as f64,
        };
        let mut own = BTreeMap::new();
        for said in &self.query {
            let (name, query) =
                said.split_once('=').ok_or_else(|| Failure::usage(format!("--query {said}: give METRIC=QUERY")))?;
            own.insert(name.to_owned(), query.to_owned());
        }
        Ok(prometheus::Asked {
            url: if url.contains("://") { url.to_owned() } else { format!("http://{url}") },
            span: (end as i64 - i64::from(self.since) * 60, end as i64),
            step: i64::from(self.step.max(1)),
            window: self.window.clone(),
            machine: self.machine_label.clone(),
            matchers: self.only.clone(),
            own,
        })
    }
}

/// Returns an alarm as it is printed as JSON.
fn document(of: &Episode, alarm: &Alarm) -> output::Alarm {
    let v = &alarm.verdict;
    output::Alarm {
        episode: of.name.clone(),
        machines: v.machines.iter().filter_map(|m| of.machines.get(*m).cloned()).collect(),
        at: of.first + v.at as i64,
        until: of.first + alarm.until as i64,
        metrics: v.metrics.iter().filter_map(|m| Some(of.series.metrics.get(*m)?.name.clone())).collect(),
        score: v.score.is_finite().then_some(v.score.into()),
        group: v.group,
    }
}

/// Returns an alarm as a line of text.
fn alarm_line(of: &Episode, alarm: &Alarm) -> String {
    let v = &alarm.verdict;
    let names: Vec<&str> = v.machines.iter().filter_map(|m| of.machines.get(*m).map(String::as_str)).collect();
    let metrics: Vec<&str> = v.metrics.iter().filter_map(|m| Some(of.series.metrics.get(*m)?.name.as_str())).collect();
    let at = chrono::DateTime::from_timestamp(of.first + v.at as i64, 0).filter(|_| of.first > 1_000_000_000);
    let when =
        at.map_or_else(|| format!("{} s", of.first + v.at as i64), |at| at.format("%Y-%m-%d %H:%M:%S UTC").to_string());
    let why = if metrics.is_empty() {
        "samples stopped arriving".to_owned()
    } else {
        format!("{} ({:.1} times the usual spread)", metrics.join(", "), v.score)
    };
    let what = if v.group { "a group (a switch, a rack, a role), not one machine" } else { "unlike its peers" };
    let episode = if of.name.is_empty() { String::new() } else { format!("{}  ", of.name) };
    format!("{episode}{when}  {}  {what}: {why}", names.join(", "))
}

fn draw(path: Option<&PathBuf>, found: &[(&Episode, Vec<Alarm>)]) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    let first = found.iter().find_map(|(of, alarms)| Some((of, alarms.first()?)));
    let Some((of, alarm)) = first else {
        crate::say!("no machine was reported, so there is nothing to draw");
        return Ok(());
    };
    let name = alarm.verdict.machines.first().and_then(|m| of.machines.get(*m)).map_or("", String::as_str);
    write(path, &alarm_chart::named(&of.series, alarm, name))
}

fn looked<'e>(read: &'e Read, with: &With) -> Result<Vec<(&'e Episode, Vec<Alarm>)>, Failure> {
    let ready = with.ready()?;
    Ok(read.episodes.iter().map(|of| (of, ready.alarms(&of.series))).collect())
}

/// Returns the detector that a file of settings describes, or the default one without a file.
pub fn ready(path: Option<&Path>) -> Result<Ready, Failure> {
    let file = path.map_or(Ok(File::default()), File::read);
    file.and_then(|file| file.ready()).map_err(|e| Failure::usage(format!("--detector: {e}")))
}

/// Runs the command.
pub fn run(o: &DetectOptions) -> Result<i32, Failure> {
    match &o.command {
        Command::Run { from, with, picture, json } => {
            with.ready()?;
            let read = from.read()?;
            let found = looked(&read, with)?;
            let all = || found.iter().flat_map(|(of, alarms)| alarms.iter().map(move |a| (*of, a)));
            if *json {
                let alarms = all().map(|(of, alarm)| document(of, alarm)).collect();
                print_json(&Detected { version: FIRST, alarms })?;
            } else {
                all().for_each(|(of, alarm)| println!("{}", alarm_line(of, alarm)));
            }
            draw(picture.as_ref(), &found)?;
            let nobody = all().next().is_none();
            if nobody && !json {
                let machines: usize = read.episodes.iter().map(|e| e.machines.len()).sum();
                println!("none of {machines} machines behaves unlike its peers");
            }
            Ok(if nobody { ExitCode::Done } else { ExitCode::Failed }.number())
        }
        Command::Eval { from, with, faults, picture, json } => {
            with.ready()?;
            let known = known(faults)?;
            let read = from.read()?;
            let found = looked(&read, with)?;
            draw(picture.as_ref(), &found)?;
            evaluated(&read, &found, &known, *json)
        }
        Command::Train { from, models: begin, faults, epochs, seed, output } => {
            let how = Training { seed: *seed, epochs: (*epochs).max(1), ..Training::default() };
            let begin = begin.as_deref().map(|path| models(Some(path))).transpose().map_err(Failure::usage)?;
            let trained = from_history(from, faults.as_deref(), begin.as_ref(), &how)?;
            write(output, &trained.written())?;
            let order: Vec<&str> = trained.order.iter().map(|m| trained.all[*m].metric.name.as_str()).collect();
            println!(
                "{}: models of {} metrics, used in this order: {}",
                output.display(),
                order.len(),
                order.join(", ")
            );
            Ok(0)
        }
        Command::Calibrate { from, with, false_alarms, output } => {
            let mut file = with.file()?;
            let read = from.read()?;
            let normal: Vec<Series> = read.episodes.into_iter().map(|e| e.series).collect();
            let found = calibrated(&file.robust, &normal, *false_alarms).map_err(Failure::usage)?;
            file.robust = found.settings;
            let text = toml::to_string(&file).map_err(|e| Failure::config(e.to_string()))?;
            write(output, &text)?;
            println!(
                "{}: thresholds {} times as large; {} alarms in {:.1} machine-days, so at most {:.1} per 1,000",
                output.display(),
                found.factor,
                found.alarms,
                found.days,
                found.per_1000
            );
            Ok(0)
        }
    }
}

fn known(path: &Path) -> Result<Vec<crate::detect::judge::Fault>, Failure> {
    let file = fs::File::open(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))?;
    faults(file).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

fn evaluated(
    read: &Read,
    found: &[(&Episode, Vec<Alarm>)],
    known: &[crate::detect::judge::Fault],
    as_json: bool,
) -> Result<i32, Failure> {
    for fault in known {
        let there = read.episodes.iter().any(|e| e.name == fault.episode && e.machines.contains(&fault.machine));
        if !there {
            crate::say_warning!(
                "a fault of machine {} is known, but there are no samples of that machine; it does not count as missed",
                fault.machine
            );
        }
    }
    let mut score = Score::default();
    found.iter().for_each(|(of, alarms)| score.add(of, alarms, known));
    let per_1000 = score.wrong as f64 / score.days.max(f64::MIN_POSITIVE) * 1000.0;
    let f1 = score.precision().zip(score.recall()).map(|(p, r)| if p + r > 0.0 { 2.0 * p * r / (p + r) } else { 0.0 });
    if as_json {
        let alarms = found.iter().flat_map(|(of, alarms)| alarms.iter().map(move |a| document(of, a)));
        print_json(&Evaluated {
            version: FIRST,
            precision: score.precision(),
            recall: score.recall(),
            f1,
            right: score.right.len(),
            wrong: score.wrong,
            missed: score.missed,
            delay_median_s: score.delay(),
            machine_days: score.days,
            false_alarms_per_1000_machine_days: per_1000,
            alarms: alarms.collect(),
        })?;
        return Ok(0);
    }
    for (of, alarms) in found {
        alarms.iter().for_each(|alarm| println!("{}", alarm_line(of, alarm)));
    }
    let share = |of: Option<f64>| of.map_or("none".into(), |x| format!("{x:.3}"));
    println!(
        "precision {}, recall {}, F1 {}: {} right, {} wrong, {} missed",
        share(score.precision()),
        share(score.recall()),
        share(f1),
        score.right.len(),
        score.wrong,
        score.missed
    );
    if let Some(delay) = score.delay() {
        println!("median delay {delay:.0} s");
    }
    println!("{:.2} machine-days, {per_1000:.2} false alarms per 1,000 machine-days", score.days);
    Ok(0)
}

fn from_history(from: &From, faults: Option<&Path>, begin: Option<&Models>, how: &Training) -> Result<Models, Failure> {
    let known = faults.map(known).transpose()?.unwrap_or_default();
    let read = from.read()?;
    let spans = |of: &Episode| -> Vec<(usize, usize)> {
        let here = known.iter().filter(|f| f.episode == of.name);
        here.map(|f| ((f.span.0 - of.first as f64).max(0.0) as usize, (f.span.1 - of.first as f64).max(0.0) as usize))
            .collect()
    };
    // Known faults are not learned as normal.
    let normal: Vec<Series> = read
        .episodes
        .iter()
        .map(|of| {
            let mut series = of.series.clone();
            for (from, until) in spans(of) {
                (from..=until)
                    .for_each(|s| (0..series.metrics.len()).for_each(|m| series.row_mut(m, s).fill(f32::NAN)));
            }
            series
        })
        .collect();
    let days: f64 = normal.iter().map(|s| (s.machines() * s.seconds()) as f64 / 86_400.0).sum();
    let about = format!("{days:.1} machine-days of {} episodes", normal.len());
    let mut models = Models::trained(&normal, how, begin, &about).map_err(Failure::usage)?;
    if !known.is_empty() {
        let all: Vec<(&Series, Vec<(usize, usize)>)> = read.episodes.iter().map(|of| (&of.series, spans(of))).collect();
        priority::put_in_order(&mut models, &all);
    }
    Ok(models)
}

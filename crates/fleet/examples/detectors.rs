//! `detectors EPISODES NODE-DAYS [MATRIX…]`: runs all detectors on the same sealed episodes and
//! prints JSON lines. The free parameters (threshold and continuity, 64 settings each) are chosen
//! on other episodes, those of the development seeds.

use everstep_detector::lstm_vae::{Model, Training, WINDOW};
use everstep_detector::minder::{Candidates, Continuity, Distance, Embedding, candidates};
use everstep_detector::prepare::{Limits, prepared};
use everstep_detector::{Detector, Series, Verdict, robust};
use everstep_fleet::score::{Found, Score, judge};
use everstep_fleet::{Episode, Matrix, Recipe, Truth, generate};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first seeds of the development and the sealed split, and the distance of further ranges
/// within a split. Sealed episodes were not looked at before the figure.
const DEVELOPMENT: u64 = 0;
const SEALED: u64 = 1 << 33;
const NORMAL: u64 = 1_000_000;
/// The distance in seconds at which the windows of the pairwise methods begin. Adjacent windows
/// give the same results as one window per second, in less time.
const STRIDE: usize = 8;

const METHODS: [&str; 8] =
    ["lstm-vae", "manhattan", "chebyshev", "raw", "mahalanobis", "joined", "whole", "no-continuity"];

struct Trained {
    limits: Vec<Limits>,
    each: Vec<Model>,
    whole: Model,
}

fn usual(matrix: Matrix, bad: usize) -> Recipe {
    Recipe { machines: None, roles: None, matrix, bad, switch: false }
}

/// Runs `work` on all seeds, on all cores. Results are in the order of the seeds.
fn each<T: Send>(seeds: std::ops::Range<u64>, work: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let (next, done) = (AtomicU64::new(seeds.start), Mutex::new(BTreeMap::new()));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let result = work(seed);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(seed, result);
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).into_values().collect()
}

/// Trains on normal episodes of the development seeds. No labels are needed.
fn trained() -> Trained {
    let normal: Vec<Series> = (0..6)
        .map(|seed| {
            let recipe = Recipe { machines: Some(64), ..usual(Matrix::Ours, 0) };
            generate(&recipe, DEVELOPMENT + 2 * NORMAL + seed).series
        })
        .collect();
    let metrics = normal[0].metrics.len();
    let limits: Vec<Limits> =
        (0..metrics).map(|m| Limits::of(normal.iter().flat_map(|s| s.metric(m).iter().copied()))).collect();
    let windows = |chosen: &[usize]| -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for series in &normal {
            let ready: Vec<Vec<f32>> = chosen.iter().map(|m| prepared(series, *m, limits[*m])).collect();
            let machines = series.machines();
            for machine in 0..machines {
                for start in (0..series.seconds() - WINDOW).step_by(11) {
                    let at = |t: usize| ready.iter().map(move |r| r[(start + t) * machines + machine]);
                    let window: Vec<f32> = (0..WINDOW).flat_map(at).collect();
                    if window.iter().all(|v| v.is_finite()) {
                        all.push(window);
                    }
                }
            }
        }
        all
    };
    let model = |chosen: Vec<usize>| {
        let all = windows(&chosen);
        let refs: Vec<&[f32]> = all.iter().map(Vec::as_slice).collect();
        Model::trained(chosen.len(), &refs, &Training::default())
    };
    let parts = each(0..metrics as u64 + 1, |at| {
        if at as usize == metrics { model((0..metrics).collect()) } else { model(vec![at as usize]) }
    });
    let (each, whole) = (parts[..metrics].to_vec(), parts[metrics].clone());
    Trained { limits, each, whole }
}

/// Returns the candidates of a method. `no-continuity` uses those of `lstm-vae`.
fn looked(method: &str, series: &Series, t: &Trained) -> Candidates {
    let (embedding, distance) = match method {
        "manhattan" => (Embedding::Each(&t.each), Distance::Manhattan),
        "chebyshev" => (Embedding::Each(&t.each), Distance::Chebyshev),
        "raw" => (Embedding::Raw, Distance::Euclid),
        "mahalanobis" => (Embedding::Moments, Distance::Euclid),
        "joined" => (Embedding::Joined(&t.each), Distance::Euclid),
        "whole" => (Embedding::Whole(&t.whole), Distance::Euclid),
        _ => (Embedding::Each(&t.each), Distance::Euclid),
    };
    candidates(series, &t.limits, embedding, distance, STRIDE)
}

/// Returns the 64 settings to choose from.
fn settings(method: &str) -> Vec<Continuity> {
    let mut all = Vec::new();
    if method == "no-continuity" {
        all.extend((0..64).map(|i| Continuity { threshold: 1.5 + 0.4 * i as f32, seconds: 0 }));
    } else {
        for seconds in [60, 120, 180, 240] {
            all.extend((0..16).map(|i| Continuity { threshold: 1.2 * 1.25f32.powi(i), seconds }));
        }
    }
    all
}

/// Metrics in the order of Minder's published priorities, as far as they exist here.
const ORDER: [usize; 10] = [8, 0, 3, 4, 5, 6, 9, 7, 1, 2];

fn verdicts(of: &Candidates, settings: &[Continuity]) -> Vec<Option<Verdict>> {
    let order: Vec<usize> = ORDER.iter().copied().filter(|m| *m < of.by_metric.len()).collect();
    settings.iter().map(|s| of.first(&order, s)).collect()
}

/// Returns the setting with the best F1 on the development episodes.
fn tuned(method: &str, t: &Trained, episodes: u64) -> Continuity {
    let all = settings(method);
    let look = |seed: u64, bad: usize| {
        let episode = generate(&usual(Matrix::Ours, bad), seed);
        let found = verdicts(&looked(method, &episode.series, t), &all);
        found.iter().map(|v| judge(v.as_ref(), episode.truth.as_ref())).collect::<Vec<Found>>()
    };
    let faulty = each(DEVELOPMENT..DEVELOPMENT + episodes, |seed| look(seed, 1));
    let normal = each(DEVELOPMENT + NORMAL..DEVELOPMENT + NORMAL + episodes, |seed| look(seed, 0));
    let f1 = |at: usize| {
        let mut score = Score::default();
        faulty.iter().for_each(|f| score.add(f[at], true));
        normal.iter().for_each(|f| score.add(f[at], false));
        score.f1()
    };
    let best = (0..all.len()).max_by(|a, b| f1(*a).total_cmp(&f1(*b)).then(b.cmp(a))).unwrap_or(0);
    all[best]
}

/// Returns the 2.5th and 97.5th percentile of F1, from 1,000 bootstrap samples of the episodes.
fn interval(all: &[(Found, bool)]) -> [f64; 2] {
    let mut rng = everstep_rng::Rng::new(7);
    let mut f1: Vec<f64> = (0..1000)
        .map(|_| {
            let mut score = Score::default();
            for _ in 0..all.len() {
                let (found, faulty) = all[rng.range(0, all.len() as u64) as usize];
                score.add(found, faulty);
            }
            score.f1()
        })
        .collect();
    f1.sort_by(f64::total_cmp);
    [f1[25], f1[974]]
}

struct Judged {
    truth: Option<Truth>,
    machines: usize,
    roles: usize,
    seconds: usize,
    /// By method, the robust detector last.
    found: Vec<Found>,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, usual: f64| args.get(at).and_then(|a| a.parse().ok()).unwrap_or(usual);
    let (episodes, node_days) = (number(0, 1000.0) as u64, number(1, 10_000.0));
    let chosen: Vec<&str> = args.iter().skip(2).map(String::as_str).collect();
    let matrices = [("ours", Matrix::Ours), ("faint", Matrix::Faint), ("random", Matrix::Random)];
    let t = trained();
    let methods: Vec<(&str, Continuity)> =
        METHODS.iter().map(|m| (*m, tuned(m, &t, (episodes / 10).clamp(20, 100)))).collect();
    for (name, when) in &methods {
        println!(
            "{}",
            json!({"of": "tuned", "method": name, "threshold": when.threshold, "continuity_s": when.seconds})
        );
    }
    let robust = robust::Settings::default();
    for (number, (called, matrix)) in
        matrices.into_iter().enumerate().filter(|(_, m)| chosen.is_empty() || chosen.contains(&m.0))
    {
        let look = |seed: u64| {
            // Half of the episodes have no fault.
            let Episode { series, truth } = generate(&usual(matrix, (seed % 2) as usize), seed);
            let mut found: Vec<Found> = Vec::new();
            let minder = looked("lstm-vae", &series, &t);
            for (name, when) in &methods {
                let own = (!matches!(*name, "lstm-vae" | "no-continuity")).then(|| looked(name, &series, &t));
                let verdict = verdicts(own.as_ref().unwrap_or(&minder), &[*when]).pop().flatten();
                found.push(judge(verdict.as_ref(), truth.as_ref()));
            }
            found.push(judge(robust.first(&series).as_ref(), truth.as_ref()));
            let roles = series.roles.last().map_or(1, |r| *r as usize + 1);
            Judged { truth, machines: series.machines(), roles, seconds: series.seconds(), found }
        };
        let from = SEALED + number as u64 * NORMAL;
        report(called, &each(from..from + 2 * episodes, look), &methods);
    }
    // False alarms over a long time without faults.
    let (mut days, mut wrong, mut from) = (0.0, 0, SEALED + 10 * NORMAL);
    while days < node_days {
        let more = each(from..from + 64, |seed| {
            let series = generate(&usual(Matrix::Ours, 0), seed).series;
            ((series.machines() * series.seconds()) as f64 / 86_400.0, robust.first(&series).is_some())
        });
        from += 64;
        days += more.iter().map(|m| m.0).sum::<f64>();
        wrong += more.iter().filter(|m| m.1).count();
    }
    println!(
        "{}",
        json!({"of": "false-alarms", "node_days": days, "wrong": wrong, "per_1000": wrong as f64 / days * 1000.0})
    );
}

fn report(matrix: &str, all: &[Judged], methods: &[(&str, Continuity)]) {
    let faulty = all.iter().filter(|j| j.truth.is_some()).count();
    let visible = all.iter().filter(|j| j.truth.as_ref().is_some_and(|t| t.visible)).count();
    let ceiling = visible as f64 / faulty.max(1) as f64;
    for (at, name) in methods.iter().map(|m| m.0).chain(["robust"]).enumerate() {
        let scored = |keep: &dyn Fn(&Judged) -> bool| {
            let mut score = Score::default();
            all.iter().filter(|j| keep(j)).for_each(|j| score.add(j.found[at], j.truth.is_some()));
            score
        };
        let score = scored(&|_| true);
        // Delays are counted for visible faults only.
        let mut seen = Score::default();
        let of_visible = all.iter().filter(|j| j.truth.as_ref().is_some_and(|t| t.visible));
        of_visible.for_each(|j| seen.add(j.found[at], true));
        let pairs: Vec<(Found, bool)> = all.iter().map(|j| (j.found[at], j.truth.is_some())).collect();
        let single = scored(&|j| j.roles == 1 && (64..=1024).contains(&j.machines));
        let mut kinds: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
        for (j, truth) in all.iter().filter_map(|j| Some((j, j.truth.as_ref()?))) {
            let of = kinds.entry(truth.kind).or_default();
            of[0] += 1;
            of[1] += usize::from(truth.visible);
            of[2] += usize::from(matches!(j.found[at], Found::Right(_)));
        }
        println!(
            "{}",
            json!({"of": "score", "matrix": matrix, "method": name, "faulty": faulty, "visible": visible, "ceiling": ceiling,
                "seconds": all.first().map_or(0, |j| j.seconds),
                "precision": score.precision(), "recall": score.recall(), "f1": score.f1(), "interval": interval(&pairs),
                "delay_median_s": seen.delay(0.5), "delay_p95_s": seen.delay(0.95), "delays": seen.right.len(),
                "single_role_f1": single.f1(), "single_role_faults": single.right.len() + single.missed, "kinds": kinds})
        );
    }
}

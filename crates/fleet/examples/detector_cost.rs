//! The cost of the detectors, in CPU time of one thread: 15 minutes of 1,024 machines with 10
//! metrics, the next second, 4,096 machines, and training. Prints one JSON line.

use everstep_detector::Series;
use everstep_detector::lstm_vae::{Layout, Model, Training, WINDOW, error, fresh, train};
use everstep_detector::minder::{Distance, Embedding, candidates};
use everstep_detector::prepare::{Limits, prepared};
use everstep_detector::robust::{Robust, Settings};
use everstep_fleet::{Matrix, Recipe, generate};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

fn cpu_ms() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let began = cpu_ms();
    let result = work();
    (cpu_ms() - began, result)
}

fn fleet(machines: usize, seed: u64) -> Series {
    generate(&Recipe { machines: Some(machines), roles: Some(4), matrix: Matrix::Ours, bad: 0, switch: false }, seed)
        .series
}

/// Returns the last `seconds` seconds.
fn last(of: &Series, seconds: usize) -> Series {
    let mut cut = Series::new(of.metrics.clone(), of.roles.clone(), seconds);
    for metric in 0..of.metrics.len() {
        for second in 0..seconds {
            cut.row_mut(metric, second).copy_from_slice(of.row(metric, of.seconds() - seconds + second));
        }
    }
    cut
}

fn robust(series: &Series) -> (f64, Vec<f64>) {
    let mut of = Robust::new(&series.metrics, &series.roles, &series.domains, Settings::default());
    let mut each = Vec::new();
    for second in 0..series.seconds() {
        let rows = (0..series.metrics.len()).map(|metric| series.row(metric, second));
        each.push(timed(|| of.second(rows)).0);
    }
    let all = each.iter().sum();
    each.sort_by(f64::total_cmp);
    (all, each)
}

fn main() {
    let series = last(&fleet(1024, 1), 900);
    let limits: Vec<Limits> = (0..10).map(|m| Limits::of(series.metric(m).iter().copied())).collect();
    let models: Vec<Model> = (0..10).filter_map(|seed| Model::new(1, fresh(&Layout::new(1), seed))).collect();
    let (minder_ms, _) = timed(|| candidates(&series, &limits, Embedding::Each(&models), Distance::Euclid, 1));
    let (robust_ms, each) = robust(&series);
    let large = last(&fleet(4096, 2), 900);
    let (large_ms, _) = robust(&large);
    let ring = 900 * 1024 * 10 * size_of::<f32>();
    // One metric (memory) of 64 machines for a day, which is 58 episodes of 25 minutes. Another
    // episode is held out.
    let day: Vec<Series> = (0..58).map(|seed| fleet(64, 100 + seed)).collect();
    let of_metric = 1;
    let limits = Limits::of(day.iter().flat_map(|s| s.metric(of_metric).iter().copied()));
    let windows = |series: &Series| -> Vec<Vec<f32>> {
        let (all, many) = (prepared(series, of_metric, limits), series.machines());
        let starts = (0..series.seconds() - WINDOW).step_by(WINDOW);
        let window = |start: usize, m: usize| (start..start + WINDOW).map(|s| all[s * many + m]).collect::<Vec<f32>>();
        let cut = starts.flat_map(|start| (0..many).map(move |m| (start, m)));
        cut.map(|(start, m)| window(start, m)).filter(|w| w.iter().all(|v| v.is_finite())).collect()
    };
    let (seen, unseen): (Vec<_>, Vec<_>) = (day.iter().flat_map(&windows).collect(), windows(&fleet(64, 999)));
    let (seen, unseen): (Vec<&[f32]>, Vec<&[f32]>) =
        (seen.iter().map(Vec::as_slice).collect(), unseen.iter().map(Vec::as_slice).collect());
    let layout = Layout::new(1);
    let (training_ms, parameters) = timed(|| train(&layout, &seen, &Training::default()));
    println!(
        "{}",
        json!({"minder_ms": minder_ms, "robust_ms": robust_ms, "tick_p99_ms": each[each.len() * 99 / 100], "tick_most_ms": each[each.len() - 1],
            "robust_4096_ms": large_ms, "ring_mb": ring as f64 / 1e6, "training_ms": training_ms, "windows": seen.len(), "epochs": Training::default().epochs,
            "error": error(&layout, &parameters, &unseen)})
    );
}

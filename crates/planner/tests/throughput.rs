//! Checks the throughput model: its arithmetic against closed forms, and its results against
//! published points, some of which were never fitted.

use everstep_planner::throughput::{
    Calibration, Hardware, Layout, Point, Recompute, Split, Transformer, best, iteration, memory, ranked,
};
use proptest::prelude::*;

fn hardware(of: &Point) -> Hardware {
    Hardware::named(&of.hardware).expect("each published point is of hardware that comes along")
}

fn off(p: &Point) -> f64 {
    let on = hardware(p);
    p.model.operations(Recompute::Nothing) / iteration(&p.model, &p.layout, &on).total() / p.achieved() - 1.0
}

fn mean_error(hardware: &str, split: Split) -> f64 {
    let all = Point::published();
    let points: Vec<&Point> = all.iter().filter(|p| p.hardware == hardware && p.split == split).collect();
    assert!(!points.is_empty());
    points.iter().map(|p| off(p).abs()).sum::<f64>() / points.len() as f64
}

#[test]
fn what_was_published_and_not_fitted_is_met() {
    assert!(mean_error("a100-80", Split::Fit) < 0.03);
    assert!(mean_error("h100", Split::Fit) < 0.03);
    let held = mean_error("a100-80", Split::HeldOut);
    println!("throughput: {:.1} % off on average where nothing was fitted", held * 100.0);
    assert!(held < 0.06, "{held}");
}

#[test]
fn what_ran_fits() {
    for p in Point::published() {
        let on = hardware(&p);
        let needs = memory(&p.model, &p.layout, &on);
        assert!(needs.fits, "{} {}: {:.0} GB", p.source, p.model.name, needs.total / 1e9);
    }
}

#[test]
fn operations_are_those_of_the_closed_form() {
    for name in ["gpt3-1.3b", "gpt3-7b", "gpt3-175b"] {
        let m = Transformer::named(name).unwrap();
        let [b, s, l, h, v] = [m.batch, m.sequence, m.layers, m.hidden, m.vocabulary].map(|n| n as f64);
        let once = 72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        let again = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        assert!((m.operations(Recompute::Nothing) / once - 1.0).abs() < 1e-12);
        assert!((m.operations(Recompute::All) / again - 1.0).abs() < 1e-12);
    }
    let billions = |name: &str| Transformer::named(name).unwrap().parameters() as f64 / 1e9;
    assert!((billions("llama3-8b") - 8.0).abs() < 0.1 && (billions("llama3-405b") - 405.0).abs() < 3.0);
}

/// Unicron, figure 4: more GPUs can achieve less, and do where the text says so (70 B on 48 and
/// 56).
#[test]
fn there_are_dips() {
    let (model, on) = (Transformer::named("gpt3-70b").unwrap(), Hardware::named("a800").unwrap());
    let per_gpu = |gpus: u64| {
        best(&model, gpus, &on, &Calibration::default()).map_or(0.0, |b| b.achieved / gpus as f64 / on.peak())
    };
    let [before, dip, after] = [48, 56, 64].map(per_gpu);
    println!("throughput: 70 B on 48, 56, 64 A800: {before:.3}, {dip:.3}, {after:.3} of peak");
    assert!(dip < 0.97 * before && dip < 0.97 * after, "{before} {dip} {after}");
    assert_eq!(per_gpu(8), 0.0, "it does not fit");
}

#[test]
fn measured_points_override_and_scale() {
    let all = Point::published();
    let one = all.iter().find(|p| p.model.name == "174.6B").unwrap();
    let on = Hardware::named("a100-80").unwrap();
    let slow = Point { tflops: one.tflops / 2.0, ..one.clone() };
    let known = Calibration::of(vec![slow.clone()]);
    assert!((known.measured(&one.model, &one.layout, &on).unwrap() / slow.achieved() - 1.0).abs() < 1e-12);
    let other = Layout { micro_batch: 2, ..one.layout.clone() };
    assert_eq!(known.measured(&one.model, &other, &on), None);
    assert!((known.scale(&one.model, &on) / 0.5 - 1.0).abs() < 0.05, "{}", known.scale(&one.model, &on));
    let with = ranked(&one.model, 384, &on, &known);
    assert!(with.iter().any(|b| b.measured && b.layout == one.layout));
}

#[test]
fn wrong_tables_are_refused_with_their_line() {
    let first = include_str!("../src/throughput/points.csv").lines().find(|l| l.starts_with("source,")).unwrap();
    let good = "x,a800,m,4096,32,32,51200,2048,512,64,8,1,1,4,full,no,no,model,140,fit";
    assert_eq!(Point::read(&format!("{first}\n{good}\n")).unwrap().len(), 1);
    for (from, to, words) in [
        ("64,8,1", "63,8,1", "does not divide"),
        ("full", "most", "is invalid; give none, selective or full"),
        ("140", "-3", "greater than zero"),
        (",fit", ",train", "give fit"),
        ("4096", "many", "many is not a number"),
        ("4096", "4097", "do not divide hidden"),
        (",no,no,", ",no,perhaps,", "neither yes nor no"),
    ] {
        let said = Point::read(&format!("{first}\n{}\n", good.replace(from, to))).unwrap_err().to_string();
        assert!(said.contains("line 2") && said.contains(words), "{said}");
    }
}

proptest! {
    /// Every layout stays below the peak and needs memory and time; more micro-batches take longer.
    #[test]
    fn times_are_possible(at in 0usize..10, gpus in 1u64..40, hardware in 0usize..5) {
        let names = ["gpt3-125m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-7b", "gpt3-13b", "gpt3-70b", "gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b"];
        let kinds = ["a100-80", "a100-40", "a800", "h100", "h800"];
        let (model, on) = (Transformer::named(names[at]).unwrap(), Hardware::named(kinds[hardware]).unwrap());
        for b in ranked(&model, gpus * 8, &on, &Calibration::default()) {
            prop_assert!(b.seconds.total() > 0.0 && b.achieved < on.peak() * b.gpus as f64, "{b:?}");
            prop_assert!(b.memory.fits && b.memory.total > b.memory.state && b.layout.gpus() == gpus * 8);
            let more = Transformer { batch: model.batch * 2, ..model.clone() };
            prop_assert!(iteration(&more, &b.layout, &on).total() > b.seconds.total());
        }
    }
}

//! Generated fleets match their description, and the same seed gives the same fleet.
#![allow(clippy::unwrap_used)]

use everstep_fleet::{Episode, Matrix, Recipe, generate};
use std::collections::BTreeMap;

const USUAL: Recipe = Recipe { machines: None, roles: None, matrix: Matrix::Ours, bad: 1, switch: false };

fn bits(of: &Episode) -> Vec<u32> {
    (0..of.series.metrics.len()).flat_map(|m| of.series.metric(m).iter().map(|v| v.to_bits())).collect()
}

#[test]
fn the_same_seed_makes_the_same_fleet() {
    let recipe = Recipe { machines: Some(16), ..USUAL };
    let (one, same, other) = (generate(&recipe, 3), generate(&recipe, 3), generate(&recipe, 4));
    assert_eq!((bits(&one), &one.truth), (bits(&same), &same.truth));
    assert_ne!(bits(&one), bits(&other));
}

#[test]
fn faults_come_as_often_as_the_table_says_and_stay_within_the_episode() {
    let recipe = Recipe { machines: Some(4), ..USUAL };
    let truths: Vec<_> = (0..600).filter_map(|seed| generate(&recipe, seed).truth).collect();
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for truth in &truths {
        *kinds.entry(truth.kind).or_default() += 1;
        assert!(truth.bad.len() == 1 && truth.bad[0] < 4 && (450..=900).contains(&truth.onset));
        assert!(truth.end > truth.onset && truth.end <= 1500);
    }
    let share = |kind: &str| kinds[kind] as f64 / 6.0;
    assert!((share("ecc") - 38.9).abs() < 6.0 && (share("cuda-execution") - 14.6).abs() < 4.5, "{kinds:?}");
    let visible = truths.iter().filter(|t| t.visible).count() as f64 / 600.0;
    assert!((0.8..1.0).contains(&visible), "{visible}");
}

#[test]
fn several_are_bad_at_once_and_neighbours_behind_a_switch() {
    let several = |switch| Recipe { machines: Some(64), bad: 4, switch, ..USUAL };
    for seed in 0..20 {
        let bad = generate(&several(true), seed).truth.unwrap().bad;
        assert_eq!(bad, (bad[0]..bad[0] + 4).collect::<Vec<_>>());
        assert_eq!(generate(&several(false), seed).truth.unwrap().bad.len(), 4);
    }
}

#[test]
fn a_machine_that_is_well_is_like_its_peers() {
    let episode = generate(&Recipe { machines: Some(64), roles: Some(4), bad: 0, ..USUAL }, 1);
    assert!(episode.truth.is_none());
    let (series, role) = (&episode.series, |m: usize| episode.series.roles[m]);
    for metric in 0..series.metrics.len() {
        let row: Vec<f32> =
            (0..64).filter(|m| role(*m) == 2).map(|m| series.at(metric, 700, m)).filter(|v| !v.is_nan()).collect();
        assert!(row.len() > 10 && row.iter().all(|v| (0.0..=1.0).contains(v)), "{row:?}");
    }
}

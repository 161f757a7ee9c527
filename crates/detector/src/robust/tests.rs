use super::*;

/// Returns the verdict if machine 3 of eight changes by factors of `times` from second 400 on.
fn named(times: [f32; 3], seconds: usize) -> Option<Verdict> {
    let of = [
        ("cpu", Family::Host, Worse::Either),
        ("gpu-duty", Family::Gpu, Worse::Less),
        ("gpu-power", Family::Gpu, Worse::Less),
    ];
    let metrics = of.map(|(name, family, worse)| Metric { name: name.into(), family, worse, floor: 0.0 });
    let mut series = Series::new(metrics.to_vec(), vec![0; 8], 400 + seconds);
    for second in 0..400 + seconds {
        for (metric, times) in times.iter().enumerate() {
            for machine in 0..8 {
                let noise = ((second * 7919 + machine * 104_729 + metric * 1299) % 101) as f32 / 2000.0;
                let off = if second >= 400 && machine == 3 { *times } else { 1.0 };
                series.row_mut(metric, second)[machine] = (0.5 + noise) * off;
            }
        }
    }
    Settings::default().first(&series)
}

#[test]
fn a_family_that_does_more_of_something_is_no_second_witness() {
    let held_back = named([0.7, 0.7, 0.7], 120).expect("two families get worse");
    assert!(held_back.machines == [3] && (480..=500).contains(&held_back.at), "{held_back:?}");
    assert_eq!(named([0.7, 0.7, 1.3], 120), None);
    assert_eq!(named([0.7, 1.0, 1.0], 120), None);
    // It is certain on its own if it lasts.
    assert_eq!(named([0.7, 0.7, 1.3], 300).map(|v| v.machines), Some(vec![3]));
}

/// One metric of 24 machines, eight per switch, multiplied by `times(second, machine)`.
fn of_one(times: impl Fn(usize, usize) -> f32) -> Option<Verdict> {
    let metric = Metric { name: "power".into(), family: Family::Gpu, worse: Worse::Less, floor: 0.0 };
    let mut series = Series::new(vec![metric], vec![0; 24], 1000);
    series.domains = (0..24).map(|m| m / 8).collect();
    for second in 0..1000 {
        for machine in 0..24 {
            let noise = ((second * 7919 + machine * 104_729) % 101) as f32 / 2000.0;
            series.row_mut(0, second)[machine] = (0.5 + noise) * times(second, machine);
        }
    }
    Settings::default().first(&series)
}

#[test]
fn who_swings_has_a_spread_of_its_own() {
    // Every other block is a tenth lower (iterations of two blocks) on some; and a long jitter.
    let swings = |second: usize, machine: usize| {
        let jitters = machine == 3 && (700..880).contains(&second);
        let down = machine < 8 && (second / 5).is_multiple_of(2);
        (if down { 0.9 } else { 1.0 }) * (if jitters { 1.3 } else { 1.0 })
    };
    assert_eq!(of_one(swings), None);
    let stays =
        |second: usize, machine: usize| swings(second, machine) * if machine == 3 && second > 700 { 1.3 } else { 1.0 };
    assert_eq!(of_one(stays).map(|v| v.machines), Some(vec![3]));
}

#[test]
fn most_of_what_is_behind_a_switch_is_the_switch() {
    let lost = |from: usize| {
        move |second: usize, machine: usize| if second > 600 && (from..16).contains(&machine) { 0.1 } else { 1.0 }
    };
    let all = of_one(lost(11)).expect("five of eight are as good as dead");
    assert_eq!((all.machines, all.group), ((8..16).collect(), true));
    let some = of_one(lost(13)).expect("so are three");
    assert_eq!((some.machines, some.group), (vec![13, 14, 15], true));
}

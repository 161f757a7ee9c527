//! Draws a reported machine against the others. For each metric that gave it away: the middle 80 %
//! of its peers, their median, its own curve, and the moment of the verdict.

use everstep_detector::Series;
use everstep_detector::alarms::Alarm;
use plotters::coord::Shift;
use plotters::prelude::*;

const WIDTH: u32 = 900;
const HEIGHT: u32 = 220;
/// Metrics to draw; the others would add nothing.
const CHARTS: usize = 4;
/// Seconds before the verdict; a third of that after it.
const AROUND: usize = 450;
/// Points of a curve.
const POINTS: usize = 300;

const PEERS: RGBColor = RGBColor(176, 190, 197);
const MIDDLE: RGBColor = RGBColor(69, 90, 100);
const NAMED: RGBColor = RGBColor(198, 40, 40);

/// Returns a quantile of sorted numbers, or NaN if there are none.
fn quantile(sorted: &[f32], share: f64) -> f32 {
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(f32::NAN)
}

/// Low, middle and high of the peers, and the machine itself.
struct Point {
    second: f64,
    peers: [f32; 3],
    own: f32,
}

fn points(series: &Series, metric: usize, machine: usize, from: usize, until: usize) -> Vec<Point> {
    let role = series.roles.get(machine);
    let peers: Vec<usize> = (0..series.machines()).filter(|m| *m != machine && series.roles.get(*m) == role).collect();
    let step = (until - from).div_ceil(POINTS).max(1);
    let mean = |m: usize, at: usize| {
        let values = (at..(at + step).min(until)).map(|s| series.at(metric, s, m)).filter(|v| v.is_finite());
        let (sum, many) = values.fold((0.0, 0.0), |(sum, many), v| (sum + v, many + 1.0f32));
        sum / many
    };
    let point = |at: usize| {
        let mut all: Vec<f32> = peers.iter().map(|m| mean(*m, at)).filter(|v| v.is_finite()).collect();
        all.sort_by(f32::total_cmp);
        Point { second: at as f64, peers: [0.1, 0.5, 0.9].map(|q| quantile(&all, q)), own: mean(machine, at) }
    };
    (from..until).step_by(step).map(point).collect()
}

fn chart(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    all: &[Point],
    caption: &str,
    at: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let values =
        || all.iter().flat_map(|p| p.peers.into_iter().chain([p.own])).filter(|v| v.is_finite()).map(f64::from);
    let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
    if !(low.is_finite() && high.is_finite()) {
        // There are no samples of it.
        return Ok(());
    }
    let (low, high) = if low < high { (low, high) } else { (low - 1.0, high + 1.0) };
    let room = 0.08 * (high - low);
    let (first, last) = (all.first().map_or(0.0, |p| p.second), all.last().map_or(1.0, |p| p.second));
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(24)
        .y_label_area_size(80)
        .build_cartesian_2d(first..last.max(first + 1.0), low - room..high + room)?;
    let from_verdict = |x: &f64| format!("{:+.0} s", x - at as f64);
    let number = |y: &f64| {
        let (by, unit) =
            [(1e9, "G"), (1e6, "M"), (1e3, "k")].into_iter().find(|(by, _)| high.abs() >= *by).unwrap_or((1.0, ""));
        format!("{:.2}{unit}", y / by)
    };
    chart.configure_mesh().max_light_lines(0).x_label_formatter(&from_verdict).y_label_formatter(&number).draw()?;
    let there = |p: &&Point| p.peers[1].is_finite();
    let up = all.iter().filter(there).map(|p| (p.second, f64::from(p.peers[2])));
    let down = all.iter().rev().filter(there).map(|p| (p.second, f64::from(p.peers[0])));
    chart.draw_series(std::iter::once(Polygon::new(up.chain(down).collect::<Vec<_>>(), PEERS.mix(0.6))))?;
    let line = |of: fn(&Point) -> f32| -> Vec<Vec<(f64, f64)>> {
        // Gaps are not bridged.
        let parts = all.split(|p| !of(p).is_finite());
        parts.map(|part| part.iter().map(|p| (p.second, f64::from(of(p)))).collect()).collect()
    };
    for part in line(|p| p.peers[1]) {
        chart.draw_series(LineSeries::new(part, MIDDLE.stroke_width(1)))?;
    }
    for part in line(|p| p.own) {
        chart.draw_series(LineSeries::new(part, NAMED.stroke_width(2)))?;
    }
    chart.draw_series(LineSeries::new([(at as f64, low - room), (at as f64, high + room)], BLACK.stroke_width(1)))?;
    Ok(())
}

/// Returns a picture (SVG) of the first machine of an alarm. `name` is its name in the captions.
#[must_use]
pub fn named(series: &Series, alarm: &Alarm, name: &str) -> String {
    let verdict = &alarm.verdict;
    let Some(machine) = verdict.machines.first().copied() else { return String::new() };
    // A machine that has stopped reporting is drawn with what it reported before.
    let metrics: Vec<usize> =
        if verdict.metrics.is_empty() { (0..series.metrics.len()).collect() } else { verdict.metrics.clone() };
    let metrics = &metrics[..metrics.len().min(CHARTS)];
    let (from, until) = (verdict.at.saturating_sub(AROUND), (verdict.at + AROUND / 3).min(series.seconds()));
    let mut text = String::new();
    {
        let area =
            SVGBackend::with_string(&mut text, (WIDTH, HEIGHT * metrics.len().max(1) as u32)).into_drawing_area();
        // Writing to a string cannot fail, only the drawing itself. A partial picture is better
        // than none.
        let _ = area.fill(&WHITE);
        for (part, metric) in area.split_evenly((metrics.len().max(1), 1)).iter().zip(metrics) {
            let called = series.metrics.get(*metric).map_or("", |m| m.name.as_str());
            let caption = format!("{called}: {name} (red), its peers (grey: eight tenths, dark: median)");
            let _ = chart(part, &points(series, *metric, machine, from, until), &caption, verdict.at);
        }
        let _ = area.present();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_detector::Verdict;
    use everstep_detector::catalogue::by_name;

    #[test]
    fn there_is_a_chart_for_each_metric_that_told_and_gaps_are_no_lines() {
        let mut series = Series::new(vec![by_name("cpu").0, by_name("net").0, by_name("disk").0], vec![0; 5], 600);
        for second in (0..600).filter(|s| *s < 200 || *s > 300) {
            series.row_mut(0, second).fill(second as f32);
            series.row_mut(2, second)[3] = 1.0;
        }
        let verdict = Verdict { machines: vec![3], at: 500, metrics: vec![2, 0, 1], score: 1.0, group: false };
        let drawn = named(&series, &Alarm { verdict, until: 500 }, "host-3");
        assert!(drawn.starts_with("<svg") && drawn.contains("cpu: host-3") && drawn.contains("disk: host-3"));
    }
}

//! Charts as SVG, and self-contained HTML pages.

use super::simulate::{by_it, shares};
use everstep_planner::throughput::Best;
use everstep_replay::Compared;
use plotters::prelude::*;

const SIZE: (u32, u32) = (900, 420);
/// One colour per account: green for training, red for lost work, other colours for waiting.
const COLOURS: [RGBColor; 8] = [
    RGBColor(46, 125, 50),
    RGBColor(198, 40, 40),
    RGBColor(255, 143, 0),
    RGBColor(253, 216, 53),
    RGBColor(94, 53, 177),
    RGBColor(2, 119, 189),
    RGBColor(176, 190, 197),
    RGBColor(69, 90, 100),
];

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn svg(draw: impl FnOnce(&DrawingArea<SVGBackend, plotters::coord::Shift>) -> Drawn) -> String {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        // Writing to a string cannot fail, only the drawing itself. A partial picture is better
        // than none.
        let _ = area.fill(&WHITE).map_err(Into::into).and_then(|()| draw(&area)).and_then(|()| Ok(area.present()?));
    }
    text
}

/// Draws what a model achieves per GPU, by the number of GPUs. Measured points have a colour of
/// their own.
pub fn dips(of: &[(u64, Option<Best>)], caption: &str) -> String {
    let per_gpu = |b: &Best| b.achieved / b.gpus as f64 / 1e12;
    let most = of.iter().filter_map(|(_, b)| b.as_ref().map(per_gpu)).fold(1.0, f64::max) * 1.1;
    let (first, last) = (of.first().map_or(0, |p| p.0), of.last().map_or(1, |p| p.0));
    svg(|area| {
        let mut chart = ChartBuilder::on(area)
            .caption(caption, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(first as f64..last.max(first + 1) as f64, 0.0..most)?;
        let whole = |x: &f64| format!("{x:.0}");
        let mut mesh = chart.configure_mesh();
        mesh.max_light_lines(0).x_label_formatter(&whole).y_label_formatter(&whole);
        mesh.x_desc("GPUs").y_desc("TFLOP/s per GPU").draw()?;
        let points = || of.iter().map(|(gpus, b)| (*gpus as f64, b.as_ref().map_or(0.0, per_gpu)));
        chart.draw_series(LineSeries::new(points(), COLOURS[5].stroke_width(2)))?;
        chart.draw_series(of.iter().map(|(gpus, b)| {
            let style = if b.as_ref().is_some_and(|b| b.measured) { COLOURS[1].filled() } else { COLOURS[5].filled() };
            Circle::new((*gpus as f64, b.as_ref().map_or(0.0, per_gpu)), 4, style)
        }))?;
        Ok(())
    })
}

/// Draws where the nodes' time went, one bar per policy.
fn bars(found: &[Compared]) -> String {
    svg(|area| {
        // The first policy is on top.
        let names: Vec<String> = found.iter().rev().map(|f| f.policy.clone()).collect();
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(110)
            .build_cartesian_2d(0.0..135.0, (0..names.len().saturating_sub(1)).into_segmented())?;
        let label = |at: &SegmentValue<usize>| match at {
            SegmentValue::CenterOf(n) => names.get(*n).cloned().unwrap_or_default(),
            _ => String::new(),
        };
        let percent = |x: &f64| if *x <= 100.0 { format!("{x:.0} %") } else { String::new() };
        chart.configure_mesh().disable_mesh().y_label_formatter(&label).x_label_formatter(&percent).draw()?;
        for (at, (name, _)) in found.first().map(shares).unwrap_or_default().into_iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let part = found.iter().rev().enumerate().map(|(row, of)| {
                let all = shares(of);
                let before: f64 = all.iter().take(at).map(|(_, s)| s * 100.0).sum();
                let this = all.get(at).map_or(0.0, |(_, s)| s * 100.0);
                let mut bar = Rectangle::new(
                    [(before, SegmentValue::Exact(row)), (before + this, SegmentValue::Exact(row + 1))],
                    colour.filled(),
                );
                bar.set_margin(6, 6, 0, 0);
                bar
            });
            chart
                .draw_series(part)?
                .label(name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::MiddleRight).background_style(WHITE).draw()?;
        Ok(())
    })
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Returns a page with a table and a chart.
pub fn comparison(found: &[Compared], caption: &str) -> String {
    let row = |of: &Compared| {
        format!(
            "<tr><td>{}</td><td>{:.2} % [{:.2}, {:.2}]</td><td>{:.2} %</td><td>{}</td></tr>",
            escaped(&of.policy),
            of.goodput.mean * 100.0,
            of.goodput.ends.0 * 100.0,
            of.goodput.ends.1 * 100.0,
            of.share.mean * 100.0,
            by_it(of)
        )
    };
    let rows: String = found.iter().map(row).collect();
    format!(
        "<!doctype html><meta charset=\"utf-8\"><title>everstep simulate</title><style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}td,th{{text-align:left;padding:.2em 1em}}</style>\
         <h1>{}</h1><table><tr><th>policy</th><th>goodput</th><th>of ideal</th>\
         <th>{} / policy</th></tr>{rows}</table>{}",
        escaped(caption),
        escaped(found.first().map_or("", |f| &f.policy)),
        bars(found)
    )
}

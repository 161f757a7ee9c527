//! `fit_throughput a100-80|h100`: fits the `[fitted]` numbers of a hardware file to the points
//! meant for it, and prints them.
//!
//! There are fewer points than numbers, so each number is drawn to its expected value (ridge, in
//! logarithms) and departs from it only as far as the points demand. Nothing is fitted to held-out
//! points; they are only printed. The expected values and their reasons are below.

use everstep_planner::throughput::{Fitted, Hardware, Layout, Point, Recompute, Split, Transformer, iteration};

/// Weight of the expected values over all points: with ten points, an error of 1 % in each weighs
/// as much as a factor of e^0.2 in every number. Fewer points weigh less.
const DRAWN: f64 = 0.025;

fn parts(of: &Fitted) -> [f64; 11] {
    let f = of;
    [
        f.product,
        f.rows,
        f.columns,
        f.odd,
        f.attention,
        f.passes,
        f.score_passes,
        f.link,
        f.network,
        f.hidden,
        f.layer_us,
    ]
}

fn whole(p: &[f64; 11]) -> Fitted {
    let [product, rows, columns, odd, attention, passes, score_passes, link, network, hidden, layer_us] = *p;
    Fitted { product, rows, columns, odd, attention, passes, score_passes, link, network, hidden, layer_us }
}

/// Returns the expected values. Products reach 75 to 85 % of the peak, and half of that at a few
/// hundred rows or columns (cuBLAS; more on faster machines). Batched products of attention reach
/// about a third. Layer norm, dropout, residuals and GeLU take some 25 passes as separate kernels,
/// and half of that if fused. Softmax with mask and dropout takes 7. Collectives reach 70 % of a
/// link (NCCL tests).
fn expected(on: &Hardware) -> Fitted {
    if on.fused_attention() {
        whole(&[0.75, 400.0, 400.0, 0.75, 0.45, 12.0, 0.0, 0.7, 0.7, 0.8, 40.0])
    } else {
        whole(&[0.8, 250.0, 200.0, 0.75, 0.35, 25.0, 7.0, 0.7, 0.7, 0.2, 60.0])
    }
}

fn computed(model: &Transformer, layout: &Layout, on: &Hardware) -> f64 {
    model.operations(Recompute::Nothing) / iteration(model, layout, on).total()
}

fn loss(points: &[Point], on: &Hardware) -> f64 {
    let error = |p: &Point| (computed(&p.model, &p.layout, on) / p.achieved()).ln().powi(2);
    let (here, there) = (parts(&on.fitted), parts(&expected(on)));
    let away = |(a, b): (f64, f64)| if b > 0.0 { (a / b).ln().powi(2) } else { 0.0 };
    let drawn: f64 = here.into_iter().zip(there).map(away).sum::<f64>() / here.len() as f64;
    let bounded =
        on.fitted.product < 0.95 && on.fitted.link < 1.0 && on.fitted.network < 1.0 && on.fitted.hidden < 0.99;
    let outside = if bounded { 0.0 } else { 1.0 };
    points.iter().map(error).sum::<f64>() / points.len() as f64 + DRAWN / points.len() as f64 * drawn + outside
}

fn main() -> Result<(), String> {
    let name = std::env::args().nth(1).unwrap_or_default();
    let mut on = Hardware::named(&name).map_err(|e| e.to_string())?;
    let points: Vec<Point> =
        Point::published().into_iter().filter(|p| p.hardware == name && p.split == Split::Fit).collect();
    on.fitted = expected(&on);
    let mut best = loss(&points, &on);
    let mut step = 0.2f64;
    while step > 1e-5 {
        let before = best;
        for at in 0..11 {
            for factor in [step.exp(), (-step).exp()] {
                let mut tried = parts(&on.fitted);
                tried[at] *= factor;
                let next = Hardware { fitted: whole(&tried), ..on.clone() };
                let this = loss(&points, &next);
                if this < best {
                    (best, on) = (this, next);
                }
            }
        }
        if best >= before {
            step /= 2.0;
        }
    }
    let names = "product rows columns odd attention passes score_passes link network hidden layer_us";
    for (name, value) in names.split(' ').zip(parts(&on.fitted)) {
        println!("{name} = {value:.4}");
    }
    for p in Point::published().iter().filter(|p| p.hardware == name) {
        let ratio = computed(&p.model, &p.layout, &on) / p.achieved();
        eprintln!(
            "{:8} {:6} {:<40} {:+6.1} %  {:?}",
            p.source,
            p.model.name,
            p.layout.to_string(),
            (ratio - 1.0) * 100.0,
            p.split
        );
    }
    Ok(())
}

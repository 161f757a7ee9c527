//! `throughput_points`: every published point beside what is computed for it, one JSON object a line; and what the model would choose.

use everstep_planner::throughput::{Calibration, Hardware, Point, Recompute, Split, iteration, memory, ranked};
use serde_json::json;

fn main() -> Result<(), String> {
    for p in Point::published() {
        let on = Hardware::named(&p.hardware)?;
        let computed = p.model.operations(Recompute::Nothing) / iteration(&p.model, &p.layout, &on).total();
        let needs = memory(&p.model, &p.layout, &on);
        let split = match p.split {
            Split::Fit => "fit",
            Split::HeldOut => "held-out",
            Split::Shown => "shown",
        };
        // Where the published layout would be among all on as many GPUs.
        let all = ranked(&p.model, p.layout.gpus(), &on, &Calibration::default());
        let better = all.iter().filter(|b| b.achieved > computed).count();
        println!(
            "{}",
            json!({
                "source": p.source, "hardware": p.hardware, "model": p.model.name, "layout": p.layout.to_string(), "gpus": p.layout.gpus(), "split": split,
                "measured": p.achieved(), "computed": computed, "off": computed / p.achieved() - 1.0, "memory_gb": needs.total / 1e9, "fits": needs.fits,
                "better": better, "best": all.first().map(|b| b.layout.to_string()),
            })
        );
    }
    Ok(())
}

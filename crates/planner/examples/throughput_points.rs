//! `throughput_points`: prints every published point with its computed value and the layout that
//! the model would choose, one JSON object per line.

use everstep_planner::throughput::{Calibration, Hardware, Point, Recompute, Split, iteration, memory, ranked};
use serde_json::json;

fn main() -> Result<(), String> {
    for p in Point::published() {
        let on = Hardware::named(&p.hardware).map_err(|e| e.to_string())?;
        let computed = p.model.operations(Recompute::Nothing) / iteration(&p.model, &p.layout, &on).total();
        let needs = memory(&p.model, &p.layout, &on);
        let split = match p.split {
            Split::Fit => "fit",
            Split::HeldOut => "held-out",
            Split::Shown => "shown",
        };
        // The rank of the published layout among all layouts on the same number of GPUs.
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

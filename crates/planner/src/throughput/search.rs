//! The search for the best layout on a number of GPUs.

use super::{Calibration, Hardware, Layout, Memory, Recompute, Seconds, Transformer, iteration, memory};

/// The best layout found for a number of GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// GPUs.
    pub gpus: u64,
    /// How.
    pub layout: Layout,
    /// Computed duration of a step, by purpose.
    pub seconds: Seconds,
    /// Memory that it needs.
    pub memory: Memory,
    /// Model FLOP/s of all GPUs together: measured, or computed and calibrated.
    pub achieved: f64,
    /// Whether `achieved` was measured.
    pub measured: bool,
}

const MICRO_BATCHES: [u64; 5] = [1, 2, 4, 8, 16];

/// Returns the layouts on exactly `gpus` GPUs.
fn layouts(model: &Transformer, gpus: u64, on: &Hardware) -> Vec<Layout> {
    let mut found = Vec::new();
    let tensors = (1..=on.gpus_per_node)
        .filter(|t| gpus.is_multiple_of(*t) && model.heads.is_multiple_of(*t) && t.is_power_of_two());
    for tensor in tensors {
        let stages = gpus / tensor;
        for pipeline in (1..=stages.min(model.layers)).filter(|p| stages.is_multiple_of(*p)) {
            let data = stages / pipeline;
            let per_stage = model.layers / pipeline;
            // As in Megatron, interleaving needs evenly divided layers and more than one stage.
            let even = model.layers.is_multiple_of(pipeline) && pipeline > 1;
            let turns = (1..=per_stage.min(4)).filter(|v| *v == 1 || (even && per_stage.is_multiple_of(*v)));
            for interleaved in turns {
                for micro_batch in MICRO_BATCHES.into_iter().filter(|b| b * data <= model.batch) {
                    for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::All] {
                        let (sequence_parallel, divided_optimizer) = (tensor > 1, true);
                        found.push(Layout {
                            tensor,
                            pipeline,
                            data,
                            micro_batch,
                            interleaved,
                            recompute,
                            sequence_parallel,
                            divided_optimizer,
                        });
                    }
                }
            }
        }
    }
    found
}

/// Returns all layouts that fit, best first. Measured layouts always qualify, and rank by their
/// measurements.
#[must_use]
pub fn ranked(model: &Transformer, gpus: u64, on: &Hardware, known: &Calibration) -> Vec<Best> {
    let (operations, scale) = (model.operations(Recompute::Nothing), known.scale(model, on));
    let one = |layout: Layout| {
        let needs = memory(model, &layout, on);
        let seen = known.measured(model, &layout, on);
        if !needs.fits && seen.is_none() {
            return None;
        }
        let seconds = iteration(model, &layout, on);
        let computed = operations / seconds.total() * scale;
        let achieved = seen.unwrap_or(computed);
        Some(Best { gpus, layout, seconds, memory: needs, achieved, measured: seen.is_some() })
    };
    // Measured layouts are candidates whatever their form.
    let mut tried = known.layouts(model, gpus, on);
    tried.extend(layouts(model, gpus, on));
    tried.sort();
    tried.dedup();
    let mut all: Vec<Best> = tried.into_iter().filter_map(one).collect();
    all.sort_by(|a, b| b.achieved.total_cmp(&a.achieved).then_with(|| a.layout.cmp(&b.layout)));
    all
}

/// Returns the best layout on exactly `gpus` GPUs. `None` means that no layout divides them and
/// fits.
#[must_use]
pub fn best(model: &Transformer, gpus: u64, on: &Hardware, known: &Calibration) -> Option<Best> {
    ranked(model, gpus, on, known).into_iter().next()
}

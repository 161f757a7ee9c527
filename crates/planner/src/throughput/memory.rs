//! How much memory of a GPU a layout needs, and whether it fits.

use super::{Hardware, Layout, Recompute, Transformer};

/// Of the GPU that needs most, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// Weights, gradients, optimizer.
    pub state: f64,
    /// What is kept for the way back.
    pub activations: f64,
    /// All, with what the process holds beside it.
    pub total: f64,
    /// It fits: some of the memory is always cut up.
    pub fits: bool,
}

/// Share of the memory that can be used.
const USABLE: f64 = 0.96;

/// As Megatron-LM's `theoretical_memory_usage.py` and Korthikanti et al. (section 4) count it.
#[must_use]
pub fn memory(model: &Transformer, of: &Layout, on: &Hardware) -> Memory {
    let (s, h, t) = (model.sequence as f64, model.hidden as f64, of.tensor as f64);
    let layers = of.stage_layers(model) as f64;
    let embedding = model.vocabulary as f64 * h * if model.untied && of.pipeline == 1 { 2.0 } else { 1.0 };
    let weights = (layers * model.layer() as f64 + embedding) / t;
    // Weights and gradients in 16 and 32 bits; the optimizer's two moments and its own weights in 32.
    let state = weights * if of.divided_optimizer { 6.0 + 12.0 / of.data as f64 } else { 18.0 };
    let sample = s * of.micro_batch as f64 * h;
    // Micro-batches whose activations the first stage keeps at once.
    let (p, v) = (of.pipeline as f64, of.interleaved as f64);
    let ahead = (p * (1.0 + if v > 1.0 { (p - 1.0) / (p * v) } else { 0.0 })).min(of.micro_batches(model) as f64);
    let scores = if on.fused_attention() { 0.0 } else { 5.0 * model.heads as f64 * s / h };
    let whole = if of.sequence_parallel { 34.0 / t } else { 10.0 + 24.0 / t };
    let kept = |with_scores: bool| sample * (whole + if with_scores { scores / t } else { 0.0 });
    let input = 2.0 * sample / if of.sequence_parallel { t } else { 1.0 };
    let activations = match of.recompute {
        Recompute::Nothing => kept(true) * layers * ahead,
        Recompute::Attention => kept(false) * layers * ahead,
        // Inputs of all layers, and one layer while it is computed again.
        Recompute::All => input * layers * ahead + kept(true),
    };
    let logits = if of.pipeline == 1 { 6.0 * s * of.micro_batch as f64 * model.vocabulary as f64 / t } else { 0.0 };
    let total = state + activations + logits + on.held_gb * 1e9;
    Memory {
        state,
        activations: activations + logits,
        total,
        fits: total <= USABLE * on.memory_gib * 1024.0 * 1024.0 * 1024.0,
    }
}

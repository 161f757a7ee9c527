//! The memory that a layout needs on a GPU, and whether it fits.

use super::{Hardware, Layout, Recompute, Transformer};

/// Memory of the GPU that needs the most, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// Weights, gradients and optimizer state.
    pub state: f64,
    /// Activations kept for the backward pass.
    pub activations: f64,
    /// Total, including what the process holds in addition to the model.
    pub total: f64,
    /// Whether the total fits; some memory is always lost to fragmentation.
    pub fits: bool,
}

/// Usable share of the memory.
const USABLE: f64 = 0.96;

/// Estimates the memory as in Megatron-LM's `theoretical_memory_usage.py` and Korthikanti et al.
/// (section 4).
#[must_use]
pub fn memory(model: &Transformer, of: &Layout, on: &Hardware) -> Memory {
    let (s, h, t) = (model.sequence as f64, model.hidden as f64, of.tensor as f64);
    let layers = of.stage_layers(model) as f64;
    let embedding = model.vocabulary as f64 * h * if model.untied && of.pipeline == 1 { 2.0 } else { 1.0 };
    let weights = (layers * model.layer() as f64 + embedding) / t;
    // Weights in 16 bits and gradients in 32; the optimizer's two moments and its own weights in
    // 32.
    let state = weights * if of.divided_optimizer { 6.0 + 12.0 / of.data as f64 } else { 18.0 };
    let sample = s * of.micro_batch as f64 * h;
    // Micro-batches whose activations the first stage keeps at the same time.
    let (p, v) = (of.pipeline as f64, of.interleaved as f64);
    let ahead = (p * (1.0 + if v > 1.0 { (p - 1.0) / (p * v) } else { 0.0 })).min(of.micro_batches(model) as f64);
    let scores = if on.fused_attention() { 0.0 } else { 5.0 * model.heads as f64 * s / h };
    let whole = if of.sequence_parallel { 34.0 / t } else { 10.0 + 24.0 / t };
    let kept = |with_scores: bool| sample * (whole + if with_scores { scores / t } else { 0.0 });
    let input = 2.0 * sample / if of.sequence_parallel { t } else { 1.0 };
    let activations = match of.recompute {
        Recompute::Nothing => kept(true) * layers * ahead,
        Recompute::Attention => kept(false) * layers * ahead,
        // The inputs of all layers, and the activations of the one layer being recomputed.
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

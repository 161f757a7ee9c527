//! The duration of a step, and what it consists of.

use super::{Hardware, Layout, Recompute, Transformer};

/// The duration of one step, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seconds {
    /// Computation in the largest stage.
    pub compute: f64,
    /// Communication between GPUs that share matrices.
    pub tensor: f64,
    /// Communication between stages.
    pub stages: f64,
    /// Waiting for the pipeline to fill and drain.
    pub bubble: f64,
    /// Communication between copies, as far as it is not hidden, and the optimizer.
    pub data: f64,
}

impl Seconds {
    /// Returns the duration of the whole step.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.compute + self.tensor + self.stages + self.bubble + self.data
    }
}

/// Returns the duration of a matrix product of `rows` × `inner` by `inner` × `columns`, in seconds.
fn product(on: &Hardware, rows: f64, columns: f64, inner: f64) -> f64 {
    let of = &on.fitted;
    let odd = |width: f64| if (width / 64.0).fract() > 0.0 { of.odd } else { 1.0 };
    let wide = |width: f64| width / (width + of.columns) * odd(width);
    let share = of.product * rows / (rows + of.rows) * wide(columns) * wide(inner);
    2.0 * rows * columns * inner / (on.peak() * share)
}

/// Returns the forward durations of one layer: products, attention, and what lies between them.
fn layer(model: &Transformer, of: &Layout, on: &Hardware) -> (f64, f64, f64) {
    let (b, s, h) = (of.micro_batch as f64, model.sequence as f64, model.hidden as f64);
    let (t, keys, inner) = (of.tensor as f64, model.key_width() as f64, model.inner() as f64);
    let rows = b * s;
    let up = inner * if model.gated { 2.0 } else { 1.0 };
    let products = product(on, rows, (h + 2.0 * keys) / t, h)
        + product(on, rows, h, h / t)
        + product(on, rows, up / t, h)
        + product(on, rows, h, inner / t);
    let head = h / model.heads as f64;
    let fit = if (head / 8.0).fract() > 0.0 { on.fitted.odd } else { 1.0 };
    let attention = 4.0 * b * s * s * h / t / (on.peak() * on.fitted.attention * fit);
    let rate = on.memory_gb_s * 1e9;
    let divided = if of.sequence_parallel { 1.0 / t } else { 0.35 + 0.65 / t };
    let scores = on.fitted.score_passes * 2.0 * b * (model.heads as f64 / t) * s * s / rate;
    let between = on.fitted.passes * 2.0 * rows * h * divided / rate + scores + on.fitted.layer_us / 1e6;
    (products, attention, between)
}

/// Returns the duration of an all-reduce of `bytes` bytes over `many` GPUs, in seconds.
fn all_reduce(bytes: f64, many: f64, bytes_per_second: f64) -> f64 {
    2.0 * (many - 1.0) / many * bytes / bytes_per_second
}

/// Computes the duration of one step of this model, with this layout, on this hardware.
#[must_use]
pub fn iteration(model: &Transformer, of: &Layout, on: &Hardware) -> Seconds {
    let (b, s, h) = (of.micro_batch as f64, model.sequence as f64, model.hidden as f64);
    let (t, p, d) = (of.tensor as f64, of.pipeline as f64, of.data as f64);
    let node = on.gpus_per_node as f64;
    let link = on.link_gb_s * 1e9 * on.fitted.link;
    let network = on.network_gb_s * 1e9 * on.fitted.network;
    let layers = of.stage_layers(model) as f64;
    let (products, attention, between) = layer(model, of, on);
    let forward = products + attention + between;
    let again = match of.recompute {
        Recompute::Nothing => 0.0,
        Recompute::Attention => attention + between / 3.0,
        Recompute::All => forward,
    };
    let logits = 3.0 * product(on, b * s, model.vocabulary as f64 / t, h);
    // The stage with the logits is assumed to have as many layers as the largest one, so it is the
    // slowest.
    let compute = layers * (3.0 * forward + again) + logits;
    let within = if t > node { network } else { link };
    let times = if of.recompute == Recompute::All { 6.0 } else { 4.0 };
    let tensor = layers * times * all_reduce(2.0 * b * s * h, t, within);
    let between_stages = if t * d >= node { network } else { link };
    let crossings = if of.pipeline > 1 { 2.0 * of.interleaved as f64 } else { 0.0 };
    let stages = crossings * 2.0 * b * s * h / t / between_stages;
    let m = of.micro_batches(model) as f64;
    let one = compute + tensor + stages;
    // Weights of the first stage, which includes the embedding.
    let weights = (layers * model.layer() as f64 + model.vocabulary as f64 * h) / t;
    // The rings of a node's GPUs share its network: each gets the share of its GPUs in the node.
    let copies = if t * d <= node { link } else { link.min(network * (node / t).max(1.0)) };
    let exchanged = all_reduce(2.0 * weights, d, copies) * (1.0 - on.fitted.hidden);
    let share = if of.divided_optimizer { d } else { 1.0 };
    let optimizer = 16.0 * weights / share / (on.memory_gb_s * 1e9);
    Seconds {
        compute: m * compute,
        tensor: m * tensor,
        stages: m * stages,
        bubble: (p - 1.0) / of.interleaved as f64 * one,
        data: exchanged + optimizer,
    }
}

//! The distribution of a model over GPUs.

use super::Transformer;

/// What is recomputed in the backward pass instead of being stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing.
    #[default]
    Nothing,
    /// The intermediate results of attention (Korthikanti et al., section 5: selective).
    Attention,
    /// Every layer.
    All,
}

impl Recompute {
    /// Parses the name used in a table of points.
    pub(super) fn named(name: &str) -> Option<Recompute> {
        [Recompute::Nothing, Recompute::Attention, Recompute::All].into_iter().find(|r| r.name() == name)
    }

    /// Returns the name used in a table of points.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Recompute::Nothing => "none",
            Recompute::Attention => "selective",
            Recompute::All => "full",
        }
    }
}

/// Degrees of parallelism and micro-batch size (Megatron's names: TP, PP, DP, MBS).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layout {
    /// GPUs that share each matrix (TP).
    pub tensor: u64,
    /// Pipeline stages (PP).
    pub pipeline: u64,
    /// Copies of the model (DP).
    pub data: u64,
    /// Samples that pass through the pipeline together (MBS).
    pub micro_batch: u64,
    /// Parts per stage in an interleaved schedule; 1: not interleaved.
    pub interleaved: u64,
    /// What is recomputed.
    pub recompute: Recompute,
    /// What tensor parallelism leaves whole is divided along the sequence.
    pub sequence_parallel: bool,
    /// The optimizer state is divided among the copies.
    pub divided_optimizer: bool,
}

impl Layout {
    /// Returns the number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> u64 {
        self.tensor * self.pipeline * self.data
    }

    /// Returns the micro-batches per step of the copy with the most; copies need not have equal
    /// numbers (Unicron assigns them in turns).
    #[must_use]
    pub fn micro_batches(&self, model: &Transformer) -> u64 {
        model.batch.div_ceil(self.micro_batch * self.data)
    }

    /// Returns the number of layers in the largest stage.
    #[must_use]
    pub fn stage_layers(&self, model: &Transformer) -> u64 {
        model.layers.div_ceil(self.pipeline * self.interleaved) * self.interleaved
    }
}

/// Formats a layout as in `TP8 PP4 DP12 MBS2`.
impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TP{} PP{} DP{} MBS{}", self.tensor, self.pipeline, self.data, self.micro_batch)?;
        if self.interleaved > 1 {
            write!(f, " VP{}", self.interleaved)?;
        }
        if self.recompute != Recompute::Nothing {
            write!(f, " {} recompute", self.recompute.name())?;
        }
        Ok(())
    }
}

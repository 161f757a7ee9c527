//! How a model lies on GPUs.

use super::Transformer;

/// What is computed a second time instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing.
    #[default]
    Nothing,
    /// What attention keeps (Korthikanti et al., section 5: selective).
    Attention,
    /// Every layer.
    All,
}

impl Recompute {
    /// As in a file of points.
    pub(super) fn named(name: &str) -> Option<Recompute> {
        [Recompute::Nothing, Recompute::Attention, Recompute::All].into_iter().find(|r| r.name() == name)
    }

    /// As in a file of points.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Recompute::Nothing => "none",
            Recompute::Attention => "selective",
            Recompute::All => "full",
        }
    }
}

/// Parallelism and micro-batches (Megatron's names: TP, PP, DP, MBS).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layout {
    /// GPUs that share each matrix.
    pub tensor: u64,
    /// Stages.
    pub pipeline: u64,
    /// Copies of the model.
    pub data: u64,
    /// Samples that go through the pipeline together.
    pub micro_batch: u64,
    /// Parts of each stage that take turns (interleaved schedule); 1: none.
    pub interleaved: u64,
    /// What is computed twice.
    pub recompute: Recompute,
    /// What tensor parallelism leaves whole is divided along the sequence, too.
    pub sequence_parallel: bool,
    /// The optimizer's state is divided over the copies.
    pub divided_optimizer: bool,
}

impl Layout {
    /// GPUs.
    #[must_use]
    pub fn gpus(&self) -> u64 {
        self.tensor * self.pipeline * self.data
    }

    /// Micro-batches per copy and step; copies need not have equally many (Unicron hands them out in turns).
    #[must_use]
    pub fn micro_batches(&self, model: &Transformer) -> u64 {
        model.batch.div_ceil(self.micro_batch * self.data)
    }

    /// Layers of the largest stage.
    #[must_use]
    pub fn stage_layers(&self, model: &Transformer) -> u64 {
        model.layers.div_ceil(self.pipeline * self.interleaved) * self.interleaved
    }
}

/// `TP8 PP4 DP12 MBS2`
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

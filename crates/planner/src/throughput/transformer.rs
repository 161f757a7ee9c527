//! A model as the throughput model sees it: the sizes of its matrices.

use serde::Deserialize;

/// A decoder with the shape of GPT-3, or of Llama (`gated`, fewer heads for keys).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transformer {
    /// Name of the model.
    pub name: String,
    /// Hidden width.
    pub hidden: u64,
    /// Number of layers.
    pub layers: u64,
    /// Number of attention heads.
    pub heads: u64,
    /// Number of heads for keys and values; 0: as many as `heads`.
    #[serde(default)]
    pub key_heads: u64,
    /// Inner width of the feed-forward part; 0: four times `hidden`.
    #[serde(default)]
    pub inner: u64,
    /// Whether the feed-forward part has a gate (a third matrix).
    #[serde(default)]
    pub gated: bool,
    /// Whether embedding and output are separate matrices.
    #[serde(default)]
    pub untied: bool,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u64,
    /// Tokens per sample.
    pub sequence: u64,
    /// Samples per step, over all ranks.
    pub batch: u64,
}

/// The built-in models: name, hidden, layers, heads, key heads, inner width (0: four times hidden),
/// vocabulary, sequence, samples per step.
///
/// GPT-3: table 2.1 of its paper, with widths rounded to multiples of 128 as in Megatron; samples
/// per step as in Unicron's setting where the paper has none (reference: 512 to 1536). Llama: the
/// papers' tables.
const KNOWN: [(&str, [u64; 8]); 10] = [
    ("gpt3-125m", [768, 12, 12, 0, 0, 51_200, 2048, 256]),
    ("gpt3-1.3b", [2048, 24, 16, 0, 0, 51_200, 2048, 512]),
    ("gpt3-2.7b", [2560, 32, 32, 0, 0, 51_200, 2048, 512]),
    ("gpt3-7b", [4096, 32, 32, 0, 0, 51_200, 2048, 1024]),
    ("gpt3-13b", [5120, 40, 40, 0, 0, 51_200, 2048, 1024]),
    ("gpt3-70b", [8192, 86, 64, 0, 0, 51_200, 2048, 1536]),
    ("gpt3-175b", [12_288, 96, 96, 0, 0, 51_200, 2048, 1536]),
    ("llama3-8b", [4096, 32, 32, 8, 14_336, 128_256, 8192, 512]),
    ("llama3-70b", [8192, 80, 64, 8, 28_672, 128_256, 8192, 1024]),
    ("llama3-405b", [16_384, 126, 128, 8, 53_248, 128_256, 8192, 2048]),
];

/// Largest size that a model may have.
const LARGEST: u64 = 1 << 24;

/// Returns the names of the built-in models, for users.
fn names() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

/// An unknown or invalid model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("there is no model {name}: give one of {}, or a file (TOML)", names())]
    Unknown { name: String },
    /// The file is not TOML, or has an unknown or missing field.
    #[error("the model's file: {}", .0.message())]
    Parse(#[source] Box<toml::de::Error>),
    #[error("model {model}: {what} = {n} is not between 1 and {LARGEST}")]
    Size { model: String, what: &'static str, n: u64 },
    #[error("model {model}: {heads} heads do not divide hidden = {hidden}")]
    Heads { model: String, heads: u64, hidden: u64 },
}

impl Transformer {
    /// Returns a built-in model by name.
    ///
    /// # Errors
    /// Fails if there is no such model. The message lists the known names.
    pub fn named(name: &str) -> Result<Transformer, ModelError> {
        let Some((_, of)) = KNOWN.iter().find(|(known, _)| *known == name) else {
            return Err(ModelError::Unknown { name: name.to_owned() });
        };
        let [hidden, layers, heads, key_heads, inner, vocabulary, sequence, batch] = *of;
        let llama = inner > 0;
        let name = name.to_owned();
        Ok(Transformer {
            name,
            hidden,
            layers,
            heads,
            key_heads,
            inner,
            gated: llama,
            untied: llama,
            vocabulary,
            sequence,
            batch,
        })
    }

    /// Parses a model file (TOML).
    ///
    /// # Errors
    /// Fails if the text is malformed, or if the sizes do not fit each other.
    pub fn read(text: &str) -> Result<Transformer, ModelError> {
        let model: Transformer = toml::from_str(text).map_err(|e| ModelError::Parse(Box::new(e)))?;
        model.checked()
    }

    pub(super) fn checked(self) -> Result<Transformer, ModelError> {
        let counts = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("vocabulary", self.vocabulary),
            ("sequence", self.sequence),
            ("batch", self.batch),
        ];
        if let Some((what, n)) = counts.into_iter().find(|(_, n)| !(1..=LARGEST).contains(n)) {
            return Err(ModelError::Size { model: self.name, what, n });
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(ModelError::Heads { model: self.name, heads: self.heads, hidden: self.hidden });
        }
        Ok(self)
    }

    /// Returns the inner width of the feed-forward part.
    #[must_use]
    pub fn inner(&self) -> u64 {
        if self.inner > 0 { self.inner } else { 4 * self.hidden }
    }

    /// Returns the width of the keys (and of the values).
    #[must_use]
    pub fn key_width(&self) -> u64 {
        let heads = if self.key_heads > 0 { self.key_heads } else { self.heads };
        self.hidden / self.heads * heads
    }

    /// Returns the number of weights in one layer.
    #[must_use]
    pub fn layer(&self) -> u64 {
        let forward = if self.gated { 3 } else { 2 };
        self.hidden * (2 * self.hidden + 2 * self.key_width() + forward * self.inner())
    }

    /// Returns the number of weights in the model.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.layers * self.layer() + self.vocabulary * self.hidden * if self.untied { 2 } else { 1 }
    }

    /// Returns the floating-point operations of one step: forward, twice as many backward, and
    /// those recomputed according to `again`.
    ///
    /// For GPT this is 72·B·s·L·h²·(1 + s/6h + V/12Lh), and with full recomputation 96·B·s·L·h²·(1
    /// + s/6h + V/16Lh) (SC'21, section 5.1).
    #[must_use]
    pub fn operations(&self, again: super::Recompute) -> f64 {
        let tokens = self.batch as f64 * self.sequence as f64;
        let layers = 2.0 * tokens * self.layers as f64 * self.layer() as f64;
        let attention = 4.0 * tokens * self.layers as f64 * self.sequence as f64 * self.hidden as f64;
        let logits = 2.0 * tokens * self.vocabulary as f64 * self.hidden as f64;
        let once_more = match again {
            super::Recompute::Nothing => 0.0,
            super::Recompute::Attention => attention,
            super::Recompute::All => layers + attention,
        };
        3.0 * (layers + attention + logits) + once_more
    }
}

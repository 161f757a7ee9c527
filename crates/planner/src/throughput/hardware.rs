//! A kind of machine: the manufacturer's numbers, and fitted ones.

use serde::Deserialize;

/// How much of a machine's performance a program reaches, fitted to measured points.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// Share of the peak that an infinitely large matrix product reaches.
    pub product: f64,
    /// Number of rows (tokens) at which a product reaches half of that.
    pub rows: f64,
    /// Number of columns, and inner width, at which a product reaches half of that.
    pub columns: f64,
    /// Share of that reached by a width that is not a multiple of 64.
    pub odd: f64,
    /// Share of the peak that the products within attention reach.
    pub attention: f64,
    /// Memory traffic between products, in passes over the activations.
    pub passes: f64,
    /// Memory traffic of attention scores, in passes over the scores; 0 if attention is fused.
    pub score_passes: f64,
    /// Share of the link between GPUs of a node that a collective reaches.
    pub link: f64,
    /// Share of the network that a collective reaches.
    pub network: f64,
    /// Share of the exchange between copies that is hidden behind computation.
    pub hidden: f64,
    /// Additional time per layer and direction, in microseconds.
    pub layer_us: f64,
}

/// A kind of machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name of the hardware.
    pub name: String,
    /// Source of the numbers.
    pub source: String,
    /// Number of GPUs per node.
    pub gpus_per_node: u64,
    /// Dense 16-bit TFLOP/s of one GPU.
    pub peak_tflops: f64,
    /// Memory of one GPU, in GiB.
    pub memory_gib: f64,
    /// Memory bandwidth of one GPU, in GB/s.
    pub memory_gb_s: f64,
    /// Link between the GPUs of a node, per GPU and direction, in GB/s.
    pub link_gb_s: f64,
    /// Network, per GPU and direction, in GB/s.
    pub network_gb_s: f64,
    /// Memory that a process holds in addition to the model, in GB: the driver's, buffers of
    /// collectives, fragmentation.
    pub held_gb: f64,
    /// The fitted numbers.
    pub fitted: Fitted,
}

/// The built-in hardware.
const KNOWN: [(&str, &str); 5] = [
    ("a100-80", include_str!("hardware/a100-80.toml")),
    ("a100-40", include_str!("hardware/a100-40.toml")),
    ("a800", include_str!("hardware/a800.toml")),
    ("h100", include_str!("hardware/h100.toml")),
    ("h800", include_str!("hardware/h800.toml")),
];

/// Returns the names of the built-in hardware, for users.
fn names() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

/// Unknown or invalid hardware.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HardwareError {
    #[error("there is no hardware {name}: give one of {}, or a file (TOML)", names())]
    Unknown { name: String },
    /// The file is not TOML, or has an unknown or missing field.
    #[error("the hardware's file: {}", .0.message())]
    Parse(#[source] Box<toml::de::Error>),
    #[error("hardware {hardware}: {what} = {amount} must be greater than zero")]
    Amount { hardware: String, what: &'static str, amount: f64 },
}

impl Hardware {
    /// Returns built-in hardware by name.
    ///
    /// # Errors
    /// Fails if there is no such hardware. The message lists the known names.
    pub fn named(name: &str) -> Result<Hardware, HardwareError> {
        let Some((_, text)) = KNOWN.iter().find(|(known, _)| *known == name) else {
            return Err(HardwareError::Unknown { name: name.to_owned() });
        };
        Hardware::read(text)
    }

    /// Parses a hardware file (TOML).
    ///
    /// # Errors
    /// Fails if the text is malformed, or if an amount is not greater than zero.
    pub fn read(text: &str) -> Result<Hardware, HardwareError> {
        let found: Hardware = toml::from_str(text).map_err(|e| HardwareError::Parse(Box::new(e)))?;
        let amounts = [
            ("peak_tflops", found.peak_tflops),
            ("memory_gib", found.memory_gib),
            ("memory_gb_s", found.memory_gb_s),
            ("link_gb_s", found.link_gb_s),
            ("network_gb_s", found.network_gb_s),
            ("gpus_per_node", found.gpus_per_node as f64),
        ];
        match amounts.into_iter().find(|(_, amount)| !(*amount > 0.0 && *amount < 1e9)) {
            Some((what, amount)) => Err(HardwareError::Amount { hardware: found.name, what, amount }),
            None => Ok(found),
        }
    }

    /// Returns the peak FLOP/s of one GPU.
    #[must_use]
    pub fn peak(&self) -> f64 {
        self.peak_tflops * 1e12
    }

    /// Returns whether attention is one kernel that stores no scores.
    #[must_use]
    pub fn fused_attention(&self) -> bool {
        self.fitted.score_passes <= 0.0
    }
}

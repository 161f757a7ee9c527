//! A kind of machine: what its makers say, and what was fitted.

use serde::Deserialize;

/// What a program gets of what a machine could do; fitted to measured points.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// Share of the peak that an endlessly large matrix product reaches.
    pub product: f64,
    /// Rows (tokens) at which a product reaches half of that,
    pub rows: f64,
    /// and columns, and inner width.
    pub columns: f64,
    /// Share of that where a width does not divide by 64.
    pub odd: f64,
    /// Share of the peak that the products within attention reach.
    pub attention: f64,
    /// How often what lies between products passes through memory, in passes over the activations,
    pub passes: f64,
    /// and over the scores of attention (0 where attention is fused).
    pub score_passes: f64,
    /// Share of the link between GPUs of a node that a collective gets,
    pub link: f64,
    /// and of the network.
    pub network: f64,
    /// Share of the exchange between copies that is hidden behind computing.
    pub hidden: f64,
    /// What each layer takes beside all that, each way, in microseconds.
    pub layer_us: f64,
}

/// A kind of machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// As people call it.
    pub name: String,
    /// Where its numbers come from.
    pub source: String,
    /// GPUs of a node.
    pub gpus_per_node: u64,
    /// Dense TFLOP/s of one GPU, in 16 bits.
    pub peak_tflops: f64,
    /// Memory of one GPU, in GiB,
    pub memory_gib: f64,
    /// its rate, in GB/s.
    pub memory_gb_s: f64,
    /// Link between the GPUs of a node, per GPU and way, in GB/s.
    pub link_gb_s: f64,
    /// Network, per GPU and way, in GB/s.
    pub network_gb_s: f64,
    /// What a process holds beside the model, in GB: the driver's, buffers of collectives, what is cut up.
    pub held_gb: f64,
    /// What is fitted.
    pub fitted: Fitted,
}

/// Those that come along.
const KNOWN: [(&str, &str); 5] = [
    ("a100-80", include_str!("hardware/a100-80.toml")),
    ("a100-40", include_str!("hardware/a100-40.toml")),
    ("a800", include_str!("hardware/a800.toml")),
    ("h100", include_str!("hardware/h100.toml")),
    ("h800", include_str!("hardware/h800.toml")),
];

impl Hardware {
    /// One that comes along.
    ///
    /// # Errors
    /// A sentence with the names there are.
    pub fn named(name: &str) -> Result<Hardware, String> {
        let Some((_, text)) = KNOWN.iter().find(|(known, _)| *known == name) else {
            let names: Vec<&str> = KNOWN.iter().map(|(known, _)| *known).collect();
            return Err(format!("there is no hardware {name}: give one of {}, or a file (TOML)", names.join(", ")));
        };
        Hardware::read(text)
    }

    /// From a file.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn read(text: &str) -> Result<Hardware, String> {
        let found: Hardware = toml::from_str(text).map_err(|e| format!("the hardware's file: {}", e.message()))?;
        let amounts = [
            ("peak_tflops", found.peak_tflops),
            ("memory_gib", found.memory_gib),
            ("memory_gb_s", found.memory_gb_s),
            ("link_gb_s", found.link_gb_s),
            ("network_gb_s", found.network_gb_s),
            ("gpus_per_node", found.gpus_per_node as f64),
        ];
        match amounts.into_iter().find(|(_, amount)| !(*amount > 0.0 && *amount < 1e9)) {
            Some((what, amount)) => {
                Err(format!("hardware {}: {what} = {amount} must be more than nothing", found.name))
            }
            None => Ok(found),
        }
    }

    /// FLOP/s of one GPU at its peak.
    #[must_use]
    pub fn peak(&self) -> f64 {
        self.peak_tflops * 1e12
    }

    /// Attention is one kernel that keeps no scores.
    #[must_use]
    pub fn fused_attention(&self) -> bool {
        self.fitted.score_passes <= 0.0
    }
}

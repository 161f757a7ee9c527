//! One LSTM-VAE per metric, as in Minder (section 4.2): normal windows can be reconstructed from
//! eight numbers, others less well. It is written by hand because the network has only 389
//! parameters, and no neural-network library comes near the cost of plain loops (docs/adr/0018).

mod cell;
mod model;
mod network;
mod real;
mod rewrite;
mod train;

pub use model::Model;
pub use network::{LATENT, Layout, WINDOW};
pub use train::{Training, error, fresh, train};

//! One LSTM-VAE per metric, as in Minder (section 4.2): normal windows can be written again from eight numbers, others less well. By hand: 389
//! parameters, and no library for networks is near what this costs in plain loops (docs/adr/0018).

mod cell;
mod model;
mod network;
mod real;
mod rewrite;
mod train;

pub use model::Model;
pub use network::{LATENT, Layout, WINDOW};
pub use train::{Training, error, fresh, train};

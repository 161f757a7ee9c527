//! Parity instead of full copies (X6): a Reed–Solomon code over the shards of a group of nodes.
//! What k nodes hold is protected against the loss of any m of the group by m parity shards of a
//! k-th of a shard each.
//!
//! ```text
//!  node 0   node 1   node 2   node 3   node 4   node 5        k = 4, m = 2
//!  part 0   part 1   part 2   part 3   P        Q             the stripe that node 4 computes
//!  part 1   part 2   part 3   P        Q        part 0        ... node 3
//!  part 2   part 3   P        Q        part 0   part 1        ... and so on: each node computes one
//!  …
//! ```
//!
//! The node that computes a stripe fetches each member's part of its slot, keeps the first parity
//! shard and sends the others to the nodes after it; so every shard crosses the network once, and
//! every parity shard but the first. All nodes do this for the same step, and when all have, the
//! step is held by all, as with full copies. A lost shard is computed from any k that are left of
//! each of its stripes ([`rebuild`]). Every byte that comes from elsewhere is verified against the
//! checksums of its capture before it is used, and what is computed against its own.

pub mod encode;
pub mod layout;
pub mod parity_shard;
pub mod rebuild;
pub mod reed_solomon;
pub mod streams;

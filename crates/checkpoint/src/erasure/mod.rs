//! Parity instead of full copies (X6): a Reed–Solomon code over the shards of a group of nodes.
//! The shards of k nodes are protected against the loss of any m of the group by m parity shards,
//! each a k-th of a shard long.
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
//! every parity shard but the first. All nodes do this for the same step. When all have finished,
//! the step is held by all, as with full copies. A lost shard is computed from any k that are left
//! of each of its stripes ([`rebuild`]). Every byte from another node is verified against the
//! checksums of its capture before it is used, and every computed byte against the checksums of the
//! result.

pub mod encode;
pub mod layout;
pub mod parity_shard;
pub mod rebuild;
pub mod reed_solomon;
pub mod streams;

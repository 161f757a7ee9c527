//! A tensor that was saved in parts, read back in other parts: which bytes of which shard go where.
//!
//! ```text
//!  saved by 2 ranks, rows        wanted by 2 ranks, columns       runs that rank 0 reads
//!  ┌───────────────┐             ┌───────┬───────┐                shard 0: ▒▒▒▒···· ▒▒▒▒····
//!  │    shard 0    │             │       │       │                shard 1: ▒▒▒▒···· ▒▒▒▒····
//!  ├───────────────┤     →       │ rank 0│ rank 1│
//!  │    shard 1    │             │       │       │
//!  └───────────────┘             └───────┴───────┘
//! ```
//!
//! A plan is a list of byte ranges; only `whole`, `node_reader` and `copies` read. A part is a
//! block (DDP, FSDP2, tensor parallelism) or a range of the flattened tensor (FSDP1, ZeRO,
//! Megatron's distributed optimizer); a range is at most 2·d − 1 blocks.

pub mod copies;
pub mod node_reader;
pub mod part;
pub mod plan;
pub mod whole;

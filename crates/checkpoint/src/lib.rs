//! everstep-checkpoint moves bytes: tensors go into slots of shared memory, from there to durable
//! storage, and back. `core` decides which steps to use.
//!
//! ```text
//!  tensors ──capture──> slot (arena) ──persist──> step-N/rank-R.safetensors + manifest.json
//!     ^                   │                               │
//!     └──────restore──────┴───────────────────────────────┘   every chunk verified on the way
//! ```

pub mod arena;
pub mod capture;
pub mod copiers;
pub mod copy_crc;
pub mod direct_io;
pub mod erasure;
pub mod format;
pub mod lineage;
pub mod mapped;
pub mod memory;
pub mod objects;
pub mod persist;
mod process;
mod read_plan;
pub mod regular_file;
pub mod replicate;
pub mod reshard;
pub mod restore;
pub mod retain;
mod sealed_shard;
mod shard_source;
pub mod shm;
pub mod slot_reuse;
mod state_word;
pub mod step_board;
mod storage;
mod unique_id;

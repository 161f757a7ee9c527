//! everstep-checkpoint moves bytes. What a step is worth is decided in `core`; here tensors go into
//! slots of shared memory, from there to durable storage, and back.
//!
//! ```text
//!  tensors ──capture──> slot (arena) ──persist──> step-N/rank-R.safetensors + manifest.json
//!     ^                   │                               │
//!     └──────restore──────┴───────────────────────────────┘   every chunk verified on the way
//! ```

pub mod arena;
pub mod board;
pub mod capture;
pub mod copiers;
pub mod direct;
pub mod erasure;
pub mod format;
pub mod fused;
pub mod lineage;
pub mod mapped;
pub mod memory;
pub mod objects;
mod pass;
pub mod persist;
mod prepared;
mod process;
mod read_plan;
pub mod regular;
pub mod replicate;
pub mod reshard;
pub mod restore;
pub mod retain;
pub mod reuse;
pub mod shm;
mod state_word;
mod storage;
mod stored;
mod unique;

//! All shards of a durable checkpoint seen as one: any part of any tensor, whichever ranks have it.

use super::part::Part;
use super::plan::{Held, PlanError, Run, Table};

use crate::format::dtype::element_bytes;
use crate::format::index::Tensor;
use crate::format::tensor_parts::Places;
use crate::persist::read_manifest;
use crate::restore::{Headers, Readers, RestoreError, Shard, Target};
use crate::storage::Unreadable;
use everstep_core::message::ShardFile;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Why a checkpoint cannot be read as a whole.
#[derive(Debug, thiserror::Error)]
pub enum WholeError {
    /// The manifest cannot be read.
    #[error(transparent)]
    Manifest(#[from] Unreadable),
    /// One of the shards cannot be read.
    #[error(transparent)]
    Shard(#[from] RestoreError),
    /// The shards do not belong together.
    #[error("{0} has shape {1:?} in one shard and {2:?} in another; the shards are not from the same model")]
    OfTwoModels(String, Vec<u64>, Vec<u64>),
    /// The checkpoint has no such tensor.
    #[error("{0} is not in the checkpoint")]
    Unknown(String),
    /// Ranks that read together have failed.
    #[error("{0}")]
    Together(String),
    /// The memory that the ranks share cannot be used.
    #[error("the memory that ranks of this node share to read a checkpoint: {0}")]
    Window(std::io::Error),
    /// The memory has another size than the part.
    #[error("{name} has {bytes} bytes in the checkpoint, but room for {room} here")]
    Room {
        /// name of the tensor
        name: String,
        /// bytes of the part
        bytes: u64,
        /// bytes of the memory
        room: u64,
    },
    /// A part of a tensor is not in the checkpoint.
    #[error("{0}: {1}")]
    Part(String, PlanError),
}

/// A tensor of the whole checkpoint.
#[derive(Debug)]
pub struct WholeTensor {
    /// safetensors name of the element type.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// Length of an element in bytes.
    pub element: u64,
    /// Whether ranks hold parts of it.
    pub in_parts: bool,
    /// Number of ranks that hold some of it.
    pub holders: usize,
    /// Number of the first of these ranks.
    pub first: u32,
    table: Table,
}

impl WholeTensor {
    /// Returns the part of the tensor that a rank has; `None` if the rank's tensor has another
    /// shape or type.
    pub(super) fn held_by(&self, rank: u32) -> Option<&Held> {
        self.table.held_by(rank)
    }

    /// Returns the runs to read for a part; see [`Table::plan`].
    pub(super) fn plan(&self, part: &Part) -> Result<Vec<Run>, PlanError> {
        self.table.plan(part)
    }
}

/// A tensor, while the shards are being examined.
struct Found {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    element: u64,
    in_parts: bool,
    held: Vec<Held>,
}

/// All tensors that were found so far.
#[derive(Default)]
struct Tensors {
    all: Vec<Found>,
    /// Index of each tensor, by its name.
    by_name: HashMap<String, usize>,
    /// The tensors of the shard before, and the index of each one: ranks of evenly sharded state
    /// have the same ones.
    before: (Arc<[Tensor]>, Vec<usize>),
}

/// A part of a tensor, and the contiguous memory that it is copied to.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Name of the tensor.
    pub name: String,
    /// Elements that are wanted.
    pub part: Part,
    /// Address of the memory.
    pub address: usize,
    /// Length of the memory: exactly the bytes of the part.
    pub bytes: u64,
}

/// All shards of a checkpoint.
pub struct Whole {
    shards: Vec<Shard>,
    tensors: HashMap<String, WholeTensor>,
}

impl Whole {
    /// Opens all shards of a published checkpoint. Headers and tables are verified.
    ///
    /// # Errors
    /// Fails when one cannot be read, or they are of different models.
    pub fn open(directory: &Path) -> Result<Self, WholeError> {
        let shards = open_shards(directory)?;
        let mut found = Tensors::default();
        for (number, shard) in (0u32..).zip(&shards) {
            found.add(number, shard)?;
        }
        let mut tensors = HashMap::with_capacity(found.all.len());
        for Found { name, dtype, shape, element, in_parts, held } in found.all {
            let (holders, first) = (held.len(), held.first().map_or(0, |h| h.shard));
            let table = Table::new(&shape, element, held).map_err(|e| WholeError::Part(name.clone(), e))?;
            tensors.insert(name, WholeTensor { dtype, shape, element, in_parts, holders, first, table });
        }
        Ok(Whole { shards, tensors })
    }

    /// Returns the shards, one for each rank that wrote the checkpoint.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the tensors, by name.
    #[must_use]
    pub fn tensors(&self) -> &HashMap<String, WholeTensor> {
        &self.tensors
    }

    /// Returns what to read of each shard, and the memory it goes to.
    ///
    /// # Errors
    /// Fails when a tensor is unknown, or no shard has some elements of a part.
    pub fn plan(&self, wanted: &[Wanted]) -> Result<BTreeMap<u32, Vec<Target>>, WholeError> {
        let mut by_shard: BTreeMap<u32, Vec<Target>> = BTreeMap::new();
        for Wanted { name, part, address, .. } in wanted {
            let tensor = self.tensors.get(name).ok_or_else(|| WholeError::Unknown(name.clone()))?;
            let runs = tensor.table.plan(part).map_err(|e| WholeError::Part(name.clone(), e))?;
            for Run { shard, at, bytes, into } in runs {
                let target = Target { offset: at, bytes, address: address + into as usize };
                by_shard.entry(shard).or_default().push(target);
            }
        }
        Ok(by_shard)
    }

    /// Does what [`Whole::plan`] does, and checks that the memory has exactly the size of each
    /// part.
    pub(super) fn targets(&self, wanted: &[Wanted]) -> Result<BTreeMap<u32, Vec<Target>>, WholeError> {
        for Wanted { name, part, bytes: room, .. } in wanted {
            let element = self.tensors.get(name).ok_or_else(|| WholeError::Unknown(name.clone()))?.element;
            let bytes = part.elements().and_then(|n| n.checked_mul(element)).unwrap_or(u64::MAX);
            if bytes != *room {
                return Err(WholeError::Room { name: name.clone(), bytes, room: *room });
            }
        }
        self.plan(wanted)
    }

    /// Copies parts of tensors to their memory, every byte verified. Buffers take about `room`
    /// bytes.
    ///
    /// # Safety
    /// Each address must be writable for the number of bytes given, and no other thread may use it
    /// meanwhile.
    ///
    /// # Errors
    /// The same as for [`Whole::plan`] and [`Shard::load_parts`]; also fails when the size of the
    /// memory differs from that of the part.
    pub unsafe fn read(&self, wanted: &[Wanted], threads: usize, room: u64) -> Result<(), WholeError> {
        for (shard, targets) in self.targets(wanted)? {
            let Some(shard) = self.shards.get(shard as usize) else { continue };
            let readers = Readers::within(shard.threads(threads), room);
            // SAFETY: the caller keeps the targets writable and guarantees that no other thread
            // uses them.
            unsafe { shard.load_parts(&targets, readers)? };
        }
        Ok(())
    }
}

/// Opens every rank's shard of a published checkpoint, headers verified. The manifest is read once.
///
/// # Errors
/// Fails when one cannot be read.
pub fn open_shards(directory: &Path) -> Result<Vec<Shard>, WholeError> {
    let manifest = read_manifest(directory)?;
    let mut before = Headers::default();
    // By rank: a manifest may list them in any order.
    let mut shards: Vec<&ShardFile> = manifest.shards.iter().collect();
    shards.sort_by_key(|s| s.rank);
    shards.into_iter().map(|entry| Ok(Shard::from_file_after(directory, entry, &mut before)?)).collect()
}

impl Tensors {
    /// Adds the tensors of a shard to those of the others.
    fn add(&mut self, number: u32, shard: &Shard) -> Result<(), WholeError> {
        let mut places = shard.places().into_iter().flat_map(Places::iter).peekable();
        let mut at = 0;
        let lines = shard.index().tensors();
        if !Arc::ptr_eq(lines, &self.before.0) {
            self.before = (lines.clone(), Vec::with_capacity(lines.len()));
        }
        for (n, tensor) in (0usize..).zip(lines.iter()) {
            let here = at;
            at += tensor.bytes;
            let element = element_bytes(&tensor.dtype).unwrap_or(1);
            let place = places.next_if(|p| p.number == n);
            let in_parts = place.is_some();
            let shape = place.map_or(tensor.shape.as_slice(), |p| p.shape);
            let part = place.map_or_else(|| Part::whole(shape), |p| p.part(tensor));
            let held = Held::new(number, here, part);
            let known = self.before.1.get(n).or_else(|| self.by_name.get(&tensor.name)).copied();
            if self.before.1.len() == n {
                self.before.1.push(known.unwrap_or(self.all.len()));
            }
            let Some(whole) = known.and_then(|i| self.all.get_mut(i)) else {
                let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype.clone(), shape.to_vec());
                self.by_name.insert(name.clone(), self.all.len());
                self.all.push(Found { name, dtype, shape, element, in_parts, held: vec![held] });
                continue;
            };
            // A rank's own values may have other sizes in other ranks, and are requested by rank.
            if whole.shape == shape && whole.dtype == tensor.dtype && whole.in_parts == in_parts {
                whole.held.push(held);
            } else if in_parts || whole.in_parts {
                return Err(WholeError::OfTwoModels(tensor.name.clone(), whole.shape.clone(), shape.to_vec()));
            }
        }
        Ok(())
    }
}

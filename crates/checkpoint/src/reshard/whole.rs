//! All shards of a durable checkpoint seen as one: any part of any tensor, whichever ranks have it.

use super::part::Part;
use super::plan::{Held, PlanError, Run, Table};

use crate::format::shard::{Tensor, places_from_text};
use crate::persist::read_manifest;
use crate::restore::{Headers, Readers, RestoreError, Shard, Target};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Tensors have no more dimensions.
const DIMENSIONS_MAX: u64 = 64;

/// Where a tensor of a shard belongs: the shape of the whole, offsets or first element, whether it is a range.
struct Place<'a> {
    shape: &'a [u64],
    offsets: &'a [u64],
    flat: bool,
}

/// The first place of a table, and what follows it.
fn place(table: &[u64]) -> Option<(Place<'_>, &[u64])> {
    let ([_number, flat, dimensions], rest) = table.split_first_chunk::<3>()?;
    let dimensions = Some(*dimensions).filter(|n| *n <= DIMENSIONS_MAX)? as usize;
    let (shape, rest) = rest.split_at_checked(dimensions)?;
    let flat = *flat == 1;
    let (offsets, rest) = rest.split_at_checked(if flat { 1 } else { dimensions })?;
    Some((Place { shape, offsets, flat }, rest))
}

/// Why a checkpoint cannot be seen as one.
#[derive(Debug, thiserror::Error)]
pub enum WholeError {
    /// Its manifest.
    #[error("{0}")]
    Manifest(String),
    /// One of its shards.
    #[error(transparent)]
    Shard(#[from] RestoreError),
    /// What a shard says of its tensors.
    #[error("{0}: the table of where its tensors belong cannot be read; install the everstep that wrote it")]
    Places(String),
    /// Shards that do not belong together.
    #[error("{0} has shape {1:?} in one shard and {2:?} in another; the checkpoint is of no one model")]
    OfTwoModels(String, Vec<u64>, Vec<u64>),
    /// No such tensor.
    #[error("{0} is not in the checkpoint")]
    Unknown(String),
    /// Ranks that read together cannot.
    #[error("{0}")]
    Together(String),
    /// The memory that they share.
    #[error("the memory that ranks of this node share to read a checkpoint: {0}")]
    Window(std::io::Error),
    /// A part of a tensor that is not there.
    #[error("{0}: {1}")]
    Part(String, PlanError),
}

/// A tensor of the whole checkpoint.
#[derive(Debug)]
pub struct WholeTensor {
    /// As safetensors calls it.
    pub dtype: String,
    /// Of the whole.
    pub shape: Vec<u64>,
    /// Bytes of an element.
    pub element: u64,
    /// Ranks held parts of it.
    pub in_parts: bool,
    /// Number of ranks that hold some of it.
    pub holders: usize,
    /// The first of them.
    pub first: u32,
    table: Table,
}

/// A tensor while the shards are looked through.
struct Found {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    element: u64,
    in_parts: bool,
    held: Vec<Held>,
}

/// All that were found so far.
#[derive(Default)]
struct Tensors {
    all: Vec<Found>,
    /// Where each one is, by its name.
    by_name: HashMap<String, usize>,
    /// The lines of the shard before, and where each one's tensor is: ranks of evenly sharded state have the same ones.
    before: (Arc<[Tensor]>, Vec<usize>),
}

/// A part of a tensor, and the address of contiguous memory of its size.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Which tensor.
    pub name: String,
    /// Which of its elements.
    pub part: Part,
    /// Where they go.
    pub address: usize,
}

/// All shards of a checkpoint.
pub struct Whole {
    shards: Vec<Shard>,
    tensors: HashMap<String, WholeTensor>,
}

impl Whole {
    /// Opens all shards of a published checkpoint; headers and tables are verified.
    ///
    /// # Errors
    /// When one cannot be read, or they are of different models.
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

    /// One for each rank that wrote it.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Its tensors, by name.
    #[must_use]
    pub fn tensors(&self) -> &HashMap<String, WholeTensor> {
        &self.tensors
    }

    /// What to read of which shard, and where it goes.
    ///
    /// # Errors
    /// When a tensor is unknown, or no shard has all of a part.
    pub fn plan(&self, wanted: &[Wanted]) -> Result<BTreeMap<u32, Vec<Target>>, WholeError> {
        let mut by_shard: BTreeMap<u32, Vec<Target>> = BTreeMap::new();
        for Wanted { name, part, address } in wanted {
            let tensor = self.tensors.get(name).ok_or_else(|| WholeError::Unknown(name.clone()))?;
            let runs = tensor.table.plan(part).map_err(|e| WholeError::Part(name.clone(), e))?;
            for Run { shard, at, bytes, into } in runs {
                let target = Target { offset: at, bytes, address: address + into as usize };
                by_shard.entry(shard).or_default().push(target);
            }
        }
        Ok(by_shard)
    }

    /// Copies parts of tensors to where they are wanted, every byte verified; beside them, about `room` bytes of memory are
    /// used.
    ///
    /// # Safety
    /// Each address must be writable for the length of its part, and nobody else may use it meanwhile.
    ///
    /// # Errors
    /// As [`Whole::plan`], and [`Shard::load_parts`].
    pub unsafe fn read(&self, wanted: &[Wanted], threads: usize, room: u64) -> Result<(), WholeError> {
        for (shard, targets) in self.plan(wanted)? {
            let Some(shard) = self.shards.get(shard as usize) else { continue };
            let readers = Readers::within(shard.threads(threads), room);
            // SAFETY: the caller's promise.
            unsafe { shard.load_parts(&targets, readers)? };
        }
        Ok(())
    }
}

/// Opens every rank's shard of a published checkpoint, headers verified; the manifest is read once.
///
/// # Errors
/// When one cannot be read.
pub fn open_shards(directory: &Path) -> Result<Vec<Shard>, WholeError> {
    let manifest = read_manifest(directory).map_err(WholeError::Manifest)?;
    let mut before = Headers::default();
    manifest.shards.iter().map(|entry| Ok(Shard::from_file_after(directory, entry, &mut before)?)).collect()
}

impl Tensors {
    /// Puts what a shard holds beside what the others do.
    fn add(&mut self, number: u32, shard: &Shard) -> Result<(), WholeError> {
        let unreadable = || WholeError::Places(shard.path().into());
        let table = match shard.places() {
            None => Vec::new(),
            Some(text) => places_from_text(text).ok_or_else(unreadable)?,
        };
        let mut left = table.as_slice();
        let mut at = 0;
        let lines = &shard.index().tensors;
        if !Arc::ptr_eq(lines, &self.before.0) {
            self.before = (lines.clone(), Vec::with_capacity(lines.len()));
        }
        for (n, tensor) in (0u64..).zip(lines.iter()) {
            let here = at;
            at += tensor.bytes;
            let elements = tensor.shape.iter().try_fold(1u64, |n, s| n.checked_mul(*s)).unwrap_or(0);
            let element = tensor.bytes.checked_div(elements).unwrap_or(1);
            let (mut shape, mut part, in_parts) = (tensor.shape.as_slice(), None, left.first() == Some(&n));
            if in_parts {
                let (own, rest) = place(left).ok_or_else(unreadable)?;
                let first = own.offsets.first().copied().unwrap_or(0);
                part = Some(if own.flat {
                    Part::Flat { first, last: first.saturating_add(elements) }
                } else {
                    Part::Block { offsets: own.offsets.into(), sizes: tensor.shape.as_slice().into() }
                });
                (shape, left) = (own.shape, rest);
            }
            let part = part.unwrap_or_else(|| Part::whole(shape));
            let held = Held::new(number, here, part);
            let line = usize::try_from(n).unwrap_or(usize::MAX);
            let known = self.before.1.get(line).or_else(|| self.by_name.get(&tensor.name)).copied();
            if self.before.1.len() == line {
                self.before.1.push(known.unwrap_or(self.all.len()));
            }
            let Some(whole) = known.and_then(|i| self.all.get_mut(i)) else {
                let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype.clone(), shape.to_vec());
                self.by_name.insert(name.clone(), self.all.len());
                self.all.push(Found { name, dtype, shape, element, in_parts, held: vec![held] });
                continue;
            };
            // What is each rank's own has other sizes from rank to rank and is asked for by rank.
            if whole.shape == shape && whole.dtype == tensor.dtype && whole.in_parts == in_parts {
                whole.element = whole.element.max(element);
                whole.held.push(held);
            } else if in_parts || whole.in_parts {
                return Err(WholeError::OfTwoModels(tensor.name.clone(), whole.shape.clone(), shape.to_vec()));
            }
        }
        if left.is_empty() { Ok(()) } else { Err(unreadable()) }
    }
}

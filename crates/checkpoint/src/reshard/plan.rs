//! Plans what to read, from the parts that each shard has.

use super::part::{Block, Part};

/// A part of a tensor in a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Number of the shard.
    pub shard: u32,
    /// Where the part begins in the shard's region, in bytes.
    pub at: u64,
    /// Elements of the tensor that the part has.
    pub part: Part,
    /// In a [`Table`]: the part's first element in the flattened tensor.
    first: u64,
    /// In a [`Table`]: one after the last element of this and of all parts before.
    reach: u64,
}

impl Held {
    /// Describes a `part` that lies in `shard`'s region from byte `at` on.
    #[must_use]
    pub fn new(shard: u32, at: u64, part: Part) -> Self {
        Held { shard, at, part, first: 0, reach: 0 }
    }
}

/// Bytes that are contiguous both in a shard and in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the shard.
    pub shard: u32,
    /// Offset of the first byte in the shard's region.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Offset of the first byte in the target.
    pub into: u64,
}

/// Why a read cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A part that lies outside of its tensor.
    #[error("a part lies outside of its tensor of shape {0:?}: {1:?}")]
    Outside(Vec<u64>, Box<Part>),
    /// No shard has some of the elements.
    #[error("the checkpoint lacks {elements} of the {wanted} elements needed, from element {first:?} on")]
    Missing {
        /// number of elements needed
        wanted: u64,
        /// number of elements that no shard has
        elements: u64,
        /// index of the first missing element
        first: Vec<u64>,
    },
}

/// All parts of one tensor, ordered for look-ups.
#[derive(Clone, Debug)]
pub struct Table {
    shape: Vec<u64>,
    element: u64,
    /// Ordered by the first element in the flattened tensor.
    held: Vec<Held>,
}

impl Table {
    /// Creates the table of a tensor of `shape` whose elements are `element` bytes long. Of several
    /// parts with the same elements, the first is read.
    ///
    /// # Errors
    /// Fails when a part lies outside of the tensor.
    pub fn new(shape: &[u64], element: u64, mut held: Vec<Held>) -> Result<Self, PlanError> {
        if let Some(wrong) = held.iter().find(|h| !h.part.fits(shape)) {
            return Err(PlanError::Outside(shape.to_vec(), Box::new(wrong.part.clone())));
        }
        for h in &mut held {
            (h.first, h.reach) = h.part.span(shape);
        }
        held.retain(|h| h.first < h.reach);
        held.sort_by_key(|h| h.first);
        let mut reach = 0;
        for h in &mut held {
            reach = reach.max(h.reach);
            h.reach = reach;
        }
        Ok(Table { shape: shape.to_vec(), element, held })
    }

    /// Returns the part of the tensor in a shard, if there is one.
    pub(super) fn held_by(&self, shard: u32) -> Option<&Held> {
        self.held.iter().find(|h| h.shard == shard)
    }

    /// Returns the runs to read for a part of the tensor, in the order of the target.
    ///
    /// # Errors
    /// Fails when the part lies outside of the tensor, or no shard has some of its elements.
    pub fn plan(&self, wanted: &Part) -> Result<Vec<Run>, PlanError> {
        if !wanted.fits(&self.shape) {
            return Err(PlanError::Outside(self.shape.clone(), Box::new(wanted.clone())));
        }
        let mut missing = wanted.blocks(&self.shape);
        let (first, last) = wanted.span(&self.shape);
        let from = self.held.partition_point(|h| h.reach <= first);
        let to = self.held.partition_point(|h| h.first < last);
        let mut runs = Vec::new();
        for held in self.held.get(from..to).unwrap_or_default() {
            if missing.is_empty() {
                break;
            }
            for block in held.part.blocks(&self.shape) {
                let mut still = Vec::new();
                for hole in missing {
                    match hole.both(&block) {
                        Some(both) => {
                            self.runs(held, wanted, &both, &mut runs);
                            still.extend(hole.without(&both));
                        }
                        None => still.push(hole),
                    }
                }
                missing = still;
            }
        }
        if let Some(hole) = missing.first() {
            let count = |b: &Block| b.sizes.iter().product::<u64>();
            let (elements, wanted) = (missing.iter().map(count).sum(), wanted.elements().unwrap_or(0));
            return Err(PlanError::Missing { wanted, elements, first: hole.offsets.to_vec() });
        }
        runs.sort_unstable_by_key(|r| r.into);
        join(&mut runs);
        Ok(runs)
    }

    /// Appends the runs of one block that is in both parts.
    fn runs(&self, held: &Held, wanted: &Part, block: &Block, runs: &mut Vec<Run>) {
        let shape = &self.shape;
        // Include dimensions from the last one on, as long as rows are full on both sides.
        let (mut length, mut outer) = (1, shape.len());
        while outer > 0 {
            let d = outer - 1;
            let n = block.sizes.get(d).copied().unwrap_or(1);
            length *= n;
            outer = d;
            if n != held.part.row(shape, d) || n != wanted.row(shape, d) {
                break;
            }
        }
        let mut index = block.offsets.clone();
        loop {
            runs.push(Run {
                shard: held.shard,
                at: held.at + held.part.place(shape, &index) * self.element,
                bytes: length * self.element,
                into: wanted.place(shape, &index) * self.element,
            });
            // Go to the next row of the outer dimensions.
            let mut d = outer;
            loop {
                if d == 0 {
                    return;
                }
                d -= 1;
                let (Some(i), Some(o), Some(n)) = (index.get_mut(d), block.offsets.get(d), block.sizes.get(d)) else {
                    return;
                };
                *i += 1;
                if *i < o + n {
                    break;
                }
                *i = *o;
            }
        }
    }
}

/// Joins runs that are adjacent both in the shard and in the target.
fn join(runs: &mut Vec<Run>) {
    runs.dedup_by(|next, run| {
        let one = next.shard == run.shard && next.at == run.at + run.bytes && next.into == run.into + run.bytes;
        if one {
            run.bytes += next.bytes;
        }
        one
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(offsets: &[u64], sizes: &[u64]) -> Part {
        Part::Block { offsets: offsets.into(), sizes: sizes.into() }
    }

    #[test]
    fn rows_to_columns() {
        let rows = |shard, from| Held::new(shard, 100, block(&[from, 0], &[2, 4]));
        let table = Table::new(&[4, 4], 2, vec![rows(0, 0), rows(1, 2)]).unwrap();
        let runs = table.plan(&block(&[0, 0], &[4, 2])).unwrap();
        let run = |shard, at, into| Run { shard, at, bytes: 4, into };
        assert_eq!(runs, [run(0, 100, 0), run(0, 108, 4), run(1, 100, 8), run(1, 108, 12)]);
    }

    #[test]
    fn whole_shards_are_one_run_each() {
        let rows = |shard: u32| Held::new(shard, 0, block(&[u64::from(shard) * 8, 0, 0], &[8, 16, 4]));
        let table = Table::new(&[32, 16, 4], 4, (0..4).map(rows).collect()).unwrap();
        assert_eq!(table.plan(&Part::whole(&[32, 16, 4])).unwrap().len(), 4);
        assert_eq!(table.plan(&block(&[8, 0, 0], &[8, 16, 4])).unwrap().len(), 1);
        assert_eq!(table.plan(&Part::Flat { first: 100, last: 700 }).unwrap().len(), 2);
    }

    #[test]
    fn what_nobody_holds_is_said() {
        let table = Table::new(&[4, 4], 1, vec![Held::new(0, 0, block(&[0, 0], &[2, 4]))]).unwrap();
        let missing = PlanError::Missing { wanted: 16, elements: 8, first: vec![2, 0] };
        assert_eq!(table.plan(&Part::whole(&[4, 4])), Err(missing));
        assert!(matches!(table.plan(&block(&[3, 0], &[2, 4])), Err(PlanError::Outside(..))));
        assert!(Table::new(&[4], 1, vec![Held::new(0, 0, Part::Flat { first: 3, last: 5 })]).is_err());
    }

    #[test]
    fn scalars_and_empty_tensors() {
        let table = Table::new(&[], 8, vec![Held::new(3, 16, Part::whole(&[]))]).unwrap();
        assert_eq!(table.plan(&Part::whole(&[])).unwrap(), [Run { shard: 3, at: 16, bytes: 8, into: 0 }]);
        assert_eq!(table.plan(&Part::Flat { first: 0, last: 1 }).unwrap().len(), 1);
        assert_eq!(Table::new(&[0, 5], 8, vec![]).unwrap().plan(&Part::whole(&[0, 5])).unwrap(), []);
    }

    /// Generates a tensor of up to four dimensions, cut into blocks by a grid or into flat ranges.
    fn cut() -> impl Strategy<Value = (Vec<u64>, Vec<Part>, Vec<Part>)> {
        let shape = prop::collection::vec(1u64..6, 0..5);
        shape.prop_flat_map(|shape| {
            let parts = parts_of(shape.clone());
            (Just(shape.clone()), parts, parts_of(shape))
        })
    }

    fn parts_of(shape: Vec<u64>) -> impl Strategy<Value = Vec<Part>> {
        let all: u64 = shape.iter().product();
        let cuts = prop::collection::vec(any::<prop::sample::Index>(), shape.len());
        let flat = prop::collection::btree_set(0..=all, 0..5);
        (any::<bool>(), cuts, flat).prop_map(move |(is_flat, cuts, flat)| {
            if is_flat {
                let mut at: Vec<u64> = std::iter::once(0).chain(flat).chain(std::iter::once(all)).collect();
                at.dedup();
                return at.windows(2).map(|w| Part::Flat { first: w[0], last: w[1] }).collect();
            }
            let mut blocks = vec![(Vec::new(), Vec::new())];
            for (n, cut) in shape.iter().zip(cuts) {
                let at = cut.index(*n as usize + 1) as u64;
                blocks = blocks
                    .into_iter()
                    .flat_map(|(o, s): (Vec<u64>, Vec<u64>)| {
                        [(0, at), (at, n - at)].map(|(from, len)| {
                            let with =
                                |v: &Vec<u64>, x| v.iter().copied().chain(std::iter::once(x)).collect::<Vec<u64>>();
                            (with(&o, from), with(&s, len))
                        })
                    })
                    .collect();
            }
            blocks
                .into_iter()
                .map(|(offsets, sizes)| Part::Block { offsets: offsets.into(), sizes: sizes.into() })
                .collect()
        })
    }

    /// Returns the elements of a part in its own order, as positions in the flattened tensor.
    fn elements(shape: &[u64], part: &Part) -> Vec<u64> {
        let all: u64 = shape.iter().product();
        let inside = |n: &u64| match part {
            Part::Flat { first, last } => (first..last).contains(&n),
            Part::Block { offsets, sizes } => {
                let mut rest = *n;
                shape.iter().zip(offsets).zip(sizes).rev().all(|((len, o), s)| {
                    let i = rest % len;
                    rest /= len;
                    (*o..o + s).contains(&i)
                })
            }
        };
        (0..all).filter(inside).collect()
    }

    proptest! {
        #[test]
        fn every_element_comes_from_where_it_is((shape, saved, wanted) in cut(), twice in any::<bool>()) {
            let held: Vec<Held> =
                (0..).zip(saved.iter().chain(saved.iter().filter(|_| twice))).map(|(shard, part)| Held::new(shard, 7, part.clone())).collect();
            let table = Table::new(&shape, 3, held.clone()).unwrap();
            for part in &wanted {
                let runs = table.plan(part).unwrap();
                let mut got = vec![None; elements(&shape, part).len()];
                for run in &runs {
                    let source = elements(&shape, &held[run.shard as usize].part);
                    prop_assert!((run.at - 7) % 3 == 0 && run.bytes % 3 == 0 && run.into % 3 == 0 && run.bytes > 0);
                    for n in 0..run.bytes / 3 {
                        let (from, into) = (((run.at - 7) / 3 + n) as usize, (run.into / 3 + n) as usize);
                        prop_assert!(got[into].is_none(), "read twice");
                        got[into] = Some(source[from]);
                    }
                }
                let right: Vec<Option<u64>> = elements(&shape, part).into_iter().map(Some).collect();
                prop_assert_eq!(got, right);
            }
        }

        #[test]
        fn a_hole_is_always_found((shape, saved, _) in cut(), lost in any::<prop::sample::Index>()) {
            let full: Vec<Part> = saved.into_iter().filter(|p| p.elements() != Some(0)).collect();
            prop_assume!(!full.is_empty());
            let lost = lost.index(full.len());
            let held = (0..).zip(&full).filter(|(n, _)| *n as usize != lost).map(|(shard, part)| Held::new(shard, 0, part.clone()));
            let table = Table::new(&shape, 1, held.collect()).unwrap();
            let missing = table.plan(&Part::whole(&shape));
            let elements = full[lost].elements().unwrap();
            prop_assert!(matches!(missing, Err(PlanError::Missing { elements: e, .. }) if e == elements), "{missing:?}");
        }
    }
}

//! torch's own object behind a tensor (`c10::TensorImpl`), compared word by word with what it was.
//!
//! It holds everything that matters about a tensor in place: storage, offset, type, shape, strides
//! and flags. So if its words have not changed, neither has the tensor, except for the address of
//! the storage, which `c10::StorageImpl` holds. Asking torch instead takes 200 ns per tensor. Where
//! the words are is looked for once, on tensors made for that, and so is whether this torch keeps
//! them as described; if not, torch is asked.

use pyo3::prelude::*;
use std::sync::OnceLock;

/// Words of torch's object that are compared, up to the last one that has a flag in torch 2.15.
/// Every version with the table (see [`crate::tensor_metadata`]) has more.
const WORDS: usize = 22;
/// Words of a storage in which its address is looked for. It has more.
const STORAGE_WORDS: usize = 6;
/// Shape and strides are in place up to this number of dimensions (`SizesAndStrides.h`).
const DIMENSIONS_MAX: usize = 5;

type Words = [u64; WORDS];

/// Where the words are.
pub struct Layout {
    /// In the Python object: the pointer to torch's.
    pointer: usize,
    /// In torch's object: the count of references, which is not compared.
    references: usize,
    /// In torch's object: the pointer to the storage.
    storage: usize,
    /// In the storage: its address.
    data: usize,
}

/// A tensor as it was.
pub struct Known {
    words: Words,
    object: usize,
    data: u64,
}

/// Reads words of an object.
///
/// # Safety
/// `object` is aligned and has as many words, and is alive.
unsafe fn read<const N: usize>(object: usize) -> [u64; N] {
    // SAFETY: the caller's promise. Another thread may change the count of references meanwhile,
    // and with it only a word that is not compared; hence a volatile read.
    unsafe { (object as *const [u64; N]).read_volatile() }
}

/// Returns the address of torch's object behind a tensor or a storage.
pub fn address_of(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    object.getattr("_cdata")?.extract()
}

/// Positions at which something held in all of several objects. What is not in use in one of them
/// may look like anything.
struct Positions(Vec<usize>);

impl Positions {
    fn up_to(words: usize) -> Self {
        Positions((0..words).collect())
    }

    fn keep<T: PartialEq>(&mut self, words: &[T], equal: &T) {
        self.0.retain(|at| words.get(*at) == Some(equal));
    }

    fn only(&self) -> Option<usize> {
        if let [one] = self.0[..] { Some(one) } else { None }
    }
}

impl Layout {
    /// Returns where the words are, looked for once. `kind` is `torch.Tensor`. Returns `None` if
    /// this torch keeps them in another way.
    pub fn of(kind: &Bound<'_, PyAny>) -> PyResult<Option<&'static Self>> {
        static FOUND: OnceLock<Option<Layout>> = OnceLock::new();
        if FOUND.get().is_none() {
            // Another thread may find the same meanwhile.
            let _ = FOUND.set(Self::find(kind)?);
        }
        Ok(FOUND.get().and_then(Option::as_ref))
    }

    fn find(kind: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let torch = kind.py().import("torch")?;
        let size = kind.getattr("__basicsize__")?.extract::<usize>()? / size_of::<usize>();
        let (mut pointer, mut references) = (Positions::up_to(size), Positions::up_to(WORDS));
        let (mut of_storage, mut data) = (Positions::up_to(WORDS), Positions::up_to(STORAGE_WORDS));
        let mut kept = Vec::new();
        for shape in [(4, 4), (1, 1), (2, 8), (3, 5)] {
            let tensor = torch.call_method1("zeros", (shape,))?;
            let storage = tensor.call_method0("untyped_storage")?;
            let (object, held) = (address_of(&tensor)?, address_of(&storage)?);
            // SAFETY: an instance of `kind` has as many words; torch's objects behind the tensor
            // and its storage live as long as those, and nobody else has them.
            let (own, before, stored) = unsafe {
                let own = std::slice::from_raw_parts(tensor.as_ptr().cast::<usize>(), size);
                (own.to_vec(), read::<WORDS>(object), read::<STORAGE_WORDS>(held))
            };
            pointer.keep(&own, &object);
            of_storage.keep(&before, &(held as u64));
            data.keep(&stored, &storage.call_method0("data_ptr")?.extract()?);
            // A view refers to the tensor.
            let view = tensor.call_method0("t")?;
            // SAFETY: as above.
            let after: Words = unsafe { read(object) };
            let changed: Vec<bool> = before.iter().zip(&after).map(|(before, after)| before != after).collect();
            if changed.iter().filter(|c| **c).count() != 1 {
                return Ok(None);
            }
            references.keep(&changed, &true);
            kept.push((tensor, storage, view));
        }
        // What frees the memory of a storage may have its address, too, and comes behind it.
        let data = data.0.first().copied();
        let found = pointer.only().zip(references.only()).zip(of_storage.only()).zip(data);
        let Some((((pointer, references), storage), data)) = found else { return Ok(None) };
        let layout = Layout { pointer, references, storage, data };
        Ok(layout.notices_changes(&torch)?.then_some(layout))
    }

    /// Tries whether each kind of change shows.
    fn notices_changes(&self, torch: &Bound<'_, PyAny>) -> PyResult<bool> {
        type Change = for<'py> fn(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>;
        let in_place: [Change; 7] = [
            |_, t| t.call_method0("clone"),
            |_, t| t.call_method0("t"),
            |_, t| t.call_method1("view", (2, 8)),
            |torch, t| t.call_method1("view", (torch.getattr("int32")?,)),
            |_, t| t.call_method0("_neg_view"),
            |_, t| t.call_method1("narrow", (0, 1, 3)),
            |_, t| t.call_method1("__getitem__", (0,)),
        ];
        for change in in_place {
            let tensor = torch.call_method1("zeros", ((4, 4),))?;
            let Some(known) = self.known(&tensor, 2)? else { return Ok(false) };
            // SAFETY: an instance of torch's tensors.
            if !unsafe { self.unchanged(&tensor, &known) } {
                return Ok(false);
            }
            tensor.setattr("data", change(torch, &tensor)?)?;
            // SAFETY: as above.
            if unsafe { self.unchanged(&tensor, &known) } {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Remembers a tensor that has this number of dimensions. Returns `None` if they are too many.
    pub fn known(&self, tensor: &Bound<'_, PyAny>, dimensions: usize) -> PyResult<Option<Known>> {
        if dimensions > DIMENSIONS_MAX {
            return Ok(None);
        }
        let object = address_of(tensor)?;
        // SAFETY: torch's object lives as long as the tensor.
        let words: Words = unsafe { read(object) };
        // SAFETY: the tensor keeps its storage alive.
        let data = unsafe { self.data(&words) };
        Ok(data.map(|data| Known { words, object, data }))
    }

    /// The address in the storage that these words point to.
    ///
    /// # Safety
    /// The words are those of a tensor that is alive.
    unsafe fn data(&self, words: &Words) -> Option<u64> {
        let storage = usize::try_from(*words.get(self.storage)?).ok().filter(|at| *at != 0)?;
        // SAFETY: the caller's promise.
        unsafe { read::<STORAGE_WORDS>(storage) }.get(self.data).copied()
    }

    /// Returns whether nothing has changed. If something has, torch must be asked what.
    ///
    /// # Safety
    /// `tensor` is an instance of `torch.Tensor`, and the GIL is held.
    pub unsafe fn unchanged(&self, tensor: &Bound<'_, PyAny>, known: &Known) -> bool {
        // SAFETY: an instance of torch.Tensor, or of a subclass, has this word.
        let object = unsafe { tensor.as_ptr().cast::<usize>().add(self.pointer).read() };
        // `torch.utils.swap_tensors` exchanges torch's objects.
        if object != known.object {
            return false;
        }
        // SAFETY: the tensor points to it.
        let words: Words = unsafe { read(object) };
        let same = |(at, (now, then)): (usize, (&u64, &u64))| now == then || at == self.references;
        words.iter().zip(&known.words).enumerate().all(same)
            // SAFETY: the words are those of the tensor, just read.
            && unsafe { self.data(&words) } == Some(known.data)
    }
}

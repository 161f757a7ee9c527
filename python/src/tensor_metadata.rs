//! Compares tensors at each step with their earlier metadata: their address, device, type, shape
//! and strides, and whether they are negated views.
//!
//! torch reports all but the last, one tensor at a time, through `DLPack`'s exchange interface, a
//! table of C functions with a stable ABI (dlpack.h, version 1.3; torch 2.10 and later). It is
//! asked only about tensors whose object has changed (see [`crate::torch_object`]).

use crate::torch_object::{Known, Layout, address_of};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use pyo3::{PyTraverseError, PyVisit};
use std::ffi::{c_int, c_void};

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Name of the capsule that holds the table.
const CAPSULE: &std::ffi::CStr = c"dlpack_exchange_api";
/// The major version of the table that is known here, and the first minor version with all the
/// fields used.
const VERSION: (u32, u32) = (1, 3);

/// `DLPackExchangeAPI`, up to the last field used.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    earlier: *const c_void,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    object_from_managed: *const c_void,
    from_object: Option<FromObject>,
}

/// Describes a tensor without taking a reference. Returns 0, or -1 with a Python exception set.
type FromObject = unsafe extern "C" fn(*mut c_void, *mut Described) -> c_int;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Device {
    kind: i32,
    number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Described {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Described>() == 48, "as in dlpack.h");

/// Metadata that is compared for each tensor, besides its shape and strides.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    address: usize,
    device: Device,
    dtype: DataType,
    dimensions: usize,
    /// Whether reading the tensor negates the values in memory (`Tensor.is_neg`), which `DLPack`
    /// does not report.
    negated: bool,
}

impl Place {
    fn of(seen: &Described, negated: bool) -> Self {
        let address = (seen.data as usize).wrapping_add(usize::try_from(seen.byte_offset).unwrap_or(usize::MAX));
        let dimensions = usize::try_from(seen.dimensions).unwrap_or(0);
        Place { address, device: seen.device, dtype: seen.dtype, dimensions, negated }
    }
}

/// Returns the shape and the strides.
///
/// # Safety
/// torch has described the tensor, the tensor is alive, and no other code of torch or Python has
/// run since then or runs while the slices are used.
unsafe fn sides(seen: &Described) -> [&[i64]; 2] {
    let n = usize::try_from(seen.dimensions).unwrap_or(0);
    [seen.shape, seen.strides].map(|at| {
        if n == 0 || at.is_null() {
            return &[][..];
        }
        // SAFETY: the arrays have as many numbers as the tensor has dimensions (dlpack.h) and
        // belong to the tensor. The caller guarantees that the tensor is alive and has not changed
        // since it was described.
        unsafe { std::slice::from_raw_parts(at, n) }
    })
}

/// Cache lines of a tensor's Python object and of torch's objects behind it, as they were at first,
/// to be prefetched. Nothing is read through these addresses.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "elsewhere nothing is fetched ahead"))]
struct Lines([usize; 5]);

impl Lines {
    fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (behind, storage) = (address_of(tensor)?, address_of(&tensor.call_method0("untyped_storage")?)?);
        Ok(Lines([tensor.as_ptr() as usize, behind, behind + 64, behind + 128, storage]))
    }

    fn fetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for address in self.0 {
            // SAFETY: a prefetch is only a hint and cannot fail, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) }
        }
    }
}

/// How many tensors ahead the cache lines are prefetched.
const AHEAD: usize = 8;

/// The addresses and metadata of some tensors at one time.
#[pyclass(name = "Places", frozen)]
pub struct PyPlaces {
    from_object: FromObject,
    is_neg: Py<PyAny>,
    /// How to compare torch's objects, if this torch keeps them as expected.
    objects: Option<&'static Layout>,
    tensors: Vec<Seen>,
    lines: Vec<Lines>,
}

/// A tensor, and its metadata at one time.
struct Seen {
    tensor: Py<PyAny>,
    place: Place,
    /// Shape and strides.
    sides: [Vec<i64>; 2],
    object: Option<Known>,
}

#[pymethods]
impl PyPlaces {
    /// Describes these tensors. Raises `RuntimeError` or `AttributeError` when this torch has no
    /// such table, and whatever torch raises for a tensor that it cannot describe.
    #[new]
    fn new(py: Python<'_>, tensors: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let kind = py.import("torch")?.getattr("Tensor")?;
        let capsule = kind.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
        let table = capsule.pointer_checked(Some(CAPSULE))?.cast::<Table>();
        // SAFETY: a capsule of this name holds such a table, which lives as long as the process
        // (dlpack.h); the fields up to the version are the same in all versions, and the others are
        // read only once the version is known.
        let (major, minor) = unsafe { ((*table.as_ptr()).major, (*table.as_ptr()).minor) };
        let known = major == VERSION.0 && minor >= VERSION.1;
        // SAFETY: the capsule's table lives as long as the process (dlpack.h), and the version,
        // which was just checked, has this field.
        let from_object = known.then(|| unsafe { (*table.as_ptr()).from_object }).flatten();
        let from_object = from_object.ok_or_else(|| PyRuntimeError::new_err("another version of DLPack"))?;
        let is_neg = kind.getattr("is_neg")?;
        let mut places = PyPlaces {
            from_object,
            is_neg: is_neg.clone().unbind(),
            objects: Layout::of(&kind)?,
            tensors: Vec::new(),
            lines: Vec::new(),
        };
        for tensor in tensors {
            if !tensor.is_instance(&kind)? {
                return Err(PyTypeError::new_err("no tensor"));
            }
            let negated = is_neg.call1((&tensor,))?.is_truthy()?;
            // SAFETY: the function is from torch's table, and the object is an instance of torch's
            // tensors.
            let seen = unsafe { described(from_object, &tensor)? };
            // SAFETY: torch has just described the tensor, which is alive; the GIL is held, so no
            // other code has run since.
            let sides = unsafe { sides(&seen) }.map(<[i64]>::to_vec);
            let place = Place::of(&seen, negated);
            let object = places.objects.map(|o| o.known(&tensor, place.dimensions)).transpose()?.flatten();
            places.lines.extend(Lines::of(&tensor));
            places.tensors.push(Seen { tensor: tensor.unbind(), place, sides, object });
        }
        Ok(places)
    }

    /// Reports whether all tensors have the same addresses, types, shapes and strides as before,
    /// and are negated or not as before.
    fn same(&self, py: Python<'_>) -> PyResult<bool> {
        self.lines.iter().take(AHEAD).for_each(Lines::fetch);
        for (i, known) in self.tensors.iter().enumerate() {
            if let Some(lines) = self.lines.get(i + AHEAD) {
                lines.fetch();
            }
            let tensor = known.tensor.bind(py);
            // SAFETY: an instance of torch's tensors (see `new`); the GIL is held.
            let unchanged = |(layout, object): (&Layout, &Known)| unsafe { layout.unchanged(tensor, object) };
            if self.objects.zip(known.object.as_ref()).is_some_and(unchanged) {
                continue;
            }
            let negated = self.is_neg.bind(py).call1((tensor,))?.is_truthy()?;
            // SAFETY: the function is from torch's table, and the object is an instance of torch's
            // tensors (see `new`).
            let seen = unsafe { described(self.from_object, tensor)? };
            // SAFETY: torch has just described the tensor, which is alive; the GIL is held until
            // the comparison is done, so no other code runs.
            if Place::of(&seen, negated) != known.place || unsafe { sides(&seen) } != known.sides {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns whether most tensors are compared without asking torch.
    #[getter]
    fn reads_objects(&self) -> bool {
        self.objects.is_some()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.is_neg)?;
        self.tensors.iter().try_for_each(|seen| visit.call(&seen.tensor))
    }
}

/// Asks torch about a tensor.
///
/// # Safety
/// `from_object` is from torch's table, and `tensor` is an instance of torch's tensors.
unsafe fn described(from_object: FromObject, tensor: &Bound<'_, PyAny>) -> PyResult<Described> {
    let mut seen = Described {
        data: std::ptr::null_mut(),
        device: Device::default(),
        dimensions: 0,
        dtype: DataType::default(),
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };
    // SAFETY: the caller guarantees that the function is from torch's table and the object a tensor
    // of torch; the GIL is held.
    if unsafe { from_object(tensor.as_ptr().cast(), &raw mut seen) } != 0 {
        return Err(PyErr::fetch(tensor.py()));
    }
    Ok(seen)
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyPlaces>()
}

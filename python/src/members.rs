//! Compares dicts with what they contained: at each step, and with as many entries as a model has
//! parameters.
//!
//! Entries are compared by identity, because Python leaves no trace of a replacement
//! (`module.weight = other`). A number or string may also be an equal one. Remembered objects are
//! kept alive, so that no other object gets their identity.

use pyo3::exceptions::PyKeyError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use pyo3::{PyTraverseError, PyVisit};

type Entries = Vec<(Py<PyAny>, Py<PyAny>)>;

fn entries(dict: &Bound<'_, PyDict>) -> Entries {
    dict.iter().map(|(key, value)| (key.unbind(), value.unbind())).collect()
}

/// Returns whether both are numbers or strings, equal and of the same type.
fn same_value(seen: &Bound<'_, PyAny>, known: &Py<PyAny>) -> PyResult<bool> {
    let known = known.bind(seen.py());
    if let (Ok(seen), Ok(known)) = (seen.cast_exact::<PyFloat>(), known.cast_exact::<PyFloat>()) {
        // -0.0 equals 0.0, but is not the same value.
        return Ok(seen.value().to_bits() == known.value().to_bits());
    }
    let plain = seen.is_exact_instance_of::<PyInt>()
        || seen.is_exact_instance_of::<PyBool>()
        || seen.is_exact_instance_of::<PyString>();
    Ok(plain && seen.get_type().is(known.get_type()) && seen.eq(known)?)
}

fn same(dict: &Bound<'_, PyDict>, known: &Entries) -> PyResult<bool> {
    let (mut at, mut left) = (0, known.iter());
    let (mut key, mut value) = (std::ptr::null_mut(), std::ptr::null_mut());
    // Entries are borrowed: counting a reference to one would fetch its memory. SAFETY: `dict` is a
    // dict by its type, and the module holds the GIL (lib.rs): nothing changes the dict until the
    // next call, because the comparison below runs no user code.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &raw mut at, &raw mut key, &raw mut value) } != 0 {
        let Some((known_key, known_value)) = left.next() else { return Ok(false) };
        if key != known_key.as_ptr() {
            return Ok(false);
        }
        if value != known_value.as_ptr() {
            // SAFETY: `PyDict_Next` has returned a valid reference borrowed from the dict, which
            // nothing has changed since; the GIL is held. From here on there is a reference to the
            // value.
            let value = unsafe { Bound::from_borrowed_ptr(dict.py(), value) };
            if !same_value(&value, known_value)? {
                return Ok(false);
            }
        }
    }
    Ok(left.next().is_none())
}

fn within<'py>(owner: &Bound<'py, PyDict>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    owner.get_item(name)?.ok_or_else(|| PyKeyError::new_err("a member is missing"))
}

/// The entries of some dicts at one time.
#[pyclass(name = "Members", frozen)]
pub struct PyMembers {
    dicts: Vec<(Py<PyDict>, Entries)>,
    owners: Vec<Py<PyDict>>,
    /// Names of dicts in each owner, and their entries.
    held: Vec<(Py<PyString>, Vec<Entries>)>,
    /// Names of collections in each owner that must be empty.
    empty: Vec<Py<PyString>>,
}

#[pymethods]
impl PyMembers {
    /// Remembers the entries of `dicts` and, in each of `owners`, of the dicts named in `held`. The
    /// collections named in `empty` must have no entries.
    #[new]
    fn new<'py>(
        dicts: Vec<Bound<'py, PyDict>>,
        owners: Vec<Bound<'py, PyDict>>,
        held: Vec<Bound<'py, PyString>>,
        empty: Vec<Bound<'py, PyString>>,
    ) -> PyResult<Self> {
        let of = |name: &Bound<'py, PyString>| {
            let each = owners.iter().map(|o| Ok(entries(within(o, name)?.cast::<PyDict>()?)));
            Ok((name.clone().unbind(), each.collect::<PyResult<Vec<_>>>()?))
        };
        Ok(PyMembers {
            held: held.iter().map(of).collect::<PyResult<_>>()?,
            dicts: dicts.iter().map(|d| (d.clone().unbind(), entries(d))).collect(),
            owners: owners.iter().map(|o| o.clone().unbind()).collect(),
            empty: empty.into_iter().map(Bound::unbind).collect(),
        })
    }

    /// Reports whether no entry was added, removed or replaced since, and the collections that must
    /// be empty are.
    fn same(&self, py: Python<'_>) -> PyResult<bool> {
        for (dict, known) in &self.dicts {
            if !same(dict.bind(py), known)? {
                return Ok(false);
            }
        }
        for name in &self.empty {
            for owner in &self.owners {
                if !within(owner.bind(py), name.bind(py))?.is_empty()? {
                    return Ok(false);
                }
            }
        }
        for (name, each) in &self.held {
            for (owner, known) in self.owners.iter().zip(each) {
                if !same(within(owner.bind(py), name.bind(py))?.cast::<PyDict>()?, known)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let each = self.held.iter().flat_map(|(_, each)| each).chain(self.dicts.iter().map(|(_, entries)| entries));
        for (key, value) in each.flatten() {
            visit.call(key)?;
            visit.call(value)?;
        }
        self.dicts.iter().map(|(dict, _)| dict).chain(&self.owners).try_for_each(|dict| visit.call(dict))
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyMembers>()
}

//! Plain values as typed msgpack: numbers, strings, bytes, and lists, tuples and dicts of them.
//!
//! The bytes are those that `everstep/encoding.py` writes for them. That describes the format and
//! encodes everything; this module takes from it the part that each step's snapshot consists of
//! (schedulers, groups of parameters, random generators), where Python's own encoder costs more
//! than copying a small model.

use std::collections::HashSet;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use rmp::encode;

/// The first byte of a blob (`MARK`).
const MARK: u8 = 0xc1;
/// The key of a tuple (`_TUPLE`).
const TUPLE: u8 = 1;
/// The key of a group's parameters.
const PARAMETERS: &str = "params";
/// Maximum nesting. Deeper values are left to Python, which knows the limit and reports the place.
const NESTING_MAX: usize = 32;

struct Encoder {
    bytes: Vec<u8>,
    /// Lists and dicts by identity. One that occurs twice is written by its number, which Python
    /// does.
    seen: HashSet<*mut pyo3::ffi::PyObject>,
    depth: usize,
}

impl Encoder {
    /// Writes a plain value; returns `None` if it is not plain.
    fn value(&mut self, value: &Bound<'_, PyAny>) -> Option<()> {
        if value.is_none() {
            return encode::write_nil(&mut self.bytes).ok();
        }
        if let Ok(flag) = value.cast_exact::<PyBool>() {
            return encode::write_bool(&mut self.bytes, flag.is_true()).ok();
        }
        if let Ok(number) = value.cast_exact::<PyInt>() {
            return self.int(number);
        }
        if let Ok(number) = value.cast_exact::<PyFloat>() {
            return encode::write_f64(&mut self.bytes, number.value()).ok();
        }
        if let Ok(text) = value.cast_exact::<PyString>() {
            // Fails for lone surrogates.
            return encode::write_str(&mut self.bytes, text.to_str().ok()?).ok();
        }
        if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            u32::try_from(bytes.as_bytes().len()).ok()?;
            return encode::write_bin(&mut self.bytes, bytes.as_bytes()).ok();
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            return self.tuple(tuple);
        }
        self.container(value)
    }

    fn int(&mut self, number: &Bound<'_, PyInt>) -> Option<()> {
        match number.extract::<i64>() {
            Ok(number) => encode::write_sint(&mut self.bytes, number).ok().map(drop),
            Err(_) => encode::write_uint(&mut self.bytes, number.extract().ok()?).ok().map(drop),
        }
    }

    /// Writes a tuple of numbers; returns `None` for any other tuple, whose values have an identity
    /// to keep.
    fn tuple(&mut self, tuple: &Bound<'_, PyTuple>) -> Option<()> {
        encode::write_map_len(&mut self.bytes, 1).ok()?;
        encode::write_uint(&mut self.bytes, u64::from(TUPLE)).ok()?;
        encode::write_array_len(&mut self.bytes, u32::try_from(tuple.len()).ok()?).ok()?;
        for each in tuple.iter_borrowed() {
            let number = each.is_none()
                || each.is_exact_instance_of::<PyBool>()
                || each.is_exact_instance_of::<PyInt>()
                || each.is_exact_instance_of::<PyFloat>();
            if !number {
                return None;
            }
            self.value(&each)?;
        }
        Some(())
    }

    /// Writes the groups as [`Encoder::value`] would write a list of their dicts with `params` as
    /// the last key.
    fn groups(&mut self, groups: &Bound<'_, PyList>, names: &[PyBackedBytes]) -> Option<()> {
        encode::write_array_len(&mut self.bytes, u32::try_from(names.len()).ok()?).ok()?;
        if groups.len() != names.len() {
            return None;
        }
        for (group, names) in groups.iter().zip(names) {
            let group = group.cast_into_exact::<PyDict>().ok()?;
            encode::write_map_len(&mut self.bytes, u32::try_from(group.len()).ok()?).ok()?;
            let mut parameters = 0;
            for (key, each) in group.iter() {
                let key = key.cast_into_exact::<PyString>().ok()?;
                let key = key.to_str().ok()?;
                if key == PARAMETERS {
                    parameters += 1;
                    continue;
                }
                encode::write_str(&mut self.bytes, key).ok()?;
                self.value(&each)?;
            }
            encode::write_str(&mut self.bytes, PARAMETERS).ok()?;
            self.bytes.extend_from_slice(names.get(1..)?);
            if parameters != 1 {
                return None;
            }
        }
        Some(())
    }

    fn container(&mut self, value: &Bound<'_, PyAny>) -> Option<()> {
        if self.depth == NESTING_MAX || !self.seen.insert(value.as_ptr()) {
            return None;
        }
        self.depth += 1;
        if let Ok(list) = value.cast_exact::<PyList>() {
            encode::write_array_len(&mut self.bytes, u32::try_from(list.len()).ok()?).ok()?;
            for each in list.iter() {
                self.value(&each)?;
            }
        } else {
            let dict = value.cast_exact::<PyDict>().ok()?;
            encode::write_map_len(&mut self.bytes, u32::try_from(dict.len()).ok()?).ok()?;
            for (key, each) in dict.iter() {
                encode::write_str(&mut self.bytes, key.cast_exact::<PyString>().ok()?.to_str().ok()?).ok()?;
                self.value(&each)?;
            }
        }
        self.depth -= 1;
        Some(())
    }
}

/// Returns the blob of a plain value; `None` for any other, which `encoding.encode` handles.
#[pyfunction]
fn encode_plain<'py>(value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyBytes>> {
    let mut encoder = Encoder { bytes: vec![MARK], seen: HashSet::new(), depth: 0 };
    encoder.value(value)?;
    Some(PyBytes::new(value.py(), &encoder.bytes))
}

/// Returns the blob of an optimizer's groups, with the names of their parameters, which are encoded
/// already, in place of the parameters; `None` if it is not plain.
#[pyfunction]
fn encode_groups<'py>(groups: &Bound<'py, PyAny>, names: Vec<PyBackedBytes>) -> Option<Bound<'py, PyBytes>> {
    let mut encoder = Encoder { bytes: vec![MARK], seen: HashSet::new(), depth: 2 };
    encoder.groups(groups.cast_exact::<PyList>().ok()?, &names)?;
    Some(PyBytes::new(groups.py(), &encoder.bytes))
}

/// Adds the functions to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(encode_groups, m)?)?;
    m.add_function(wrap_pyfunction!(encode_plain, m)?)
}

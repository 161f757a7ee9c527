//! Element types by their safetensors names.

/// Returns the bytes of one element; `None` for a name that safetensors does not have, and for its
/// types of less than a byte.
#[must_use]
pub fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 1,
        "I16" | "U16" | "F16" | "BF16" => 2,
        "I32" | "U32" | "F32" => 4,
        "I64" | "U64" | "F64" | "C64" => 8,
        "C128" => 16,
        _ => return None,
    })
}

/// Returns the bytes that a tensor of this type and shape has; `None` when there is no such type,
/// or when its strides would not fit into 63 bits (torch computes them for empty tensors, too).
#[must_use]
pub fn tensor_bytes(dtype: &str, shape: &[u64]) -> Option<u64> {
    let element = element_bytes(dtype)?;
    let span = shape.iter().try_fold(element, |n, size| n.checked_mul((*size).max(1)))?;
    if span > i64::MAX as u64 {
        return None;
    }
    Some(if shape.contains(&0) { 0 } else { span })
}

#[cfg(test)]
mod tests {
    use super::tensor_bytes;

    #[test]
    fn lengths_follow_from_type_and_shape() {
        assert_eq!(tensor_bytes("F32", &[16, 16]), Some(1024));
        assert_eq!(tensor_bytes("BF16", &[]), Some(2));
        assert_eq!(tensor_bytes("F64", &[0, 5]), Some(0));
        assert_eq!(tensor_bytes("F4", &[4]), None, "nobody writes it");
        assert_eq!(tensor_bytes("F33", &[3]), None);
        assert_eq!(tensor_bytes("U8", &[1 << 40, 1 << 40]), None);
        assert_eq!(tensor_bytes("U8", &[1 << 40, 0, 1 << 40]), None, "strides that do not fit");
    }
}

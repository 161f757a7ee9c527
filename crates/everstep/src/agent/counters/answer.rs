//! Numbers in binary answers of the kernel, in native byte order; `None` if an answer is too short.

/// Reads two bytes at offset `at`.
pub fn short(of: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(of.get(at..at + 2)?.try_into().ok()?))
}

/// Reads four bytes at offset `at`.
pub fn long(of: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(of.get(at..at + 4)?.try_into().ok()?))
}

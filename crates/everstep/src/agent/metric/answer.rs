//! Numbers in binary answers of the kernel, in this machine's order of bytes; `None` where an answer is too short.

/// Two bytes from here on.
pub fn short(of: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(of.get(at..at + 2)?.try_into().ok()?))
}

/// Four bytes from here on.
pub fn long(of: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(of.get(at..at + 4)?.try_into().ok()?))
}

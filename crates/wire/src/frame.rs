//! Frames on Unix sockets: a length of four bytes (little endian), followed by that many bytes of
//! JSON.

use crate::limits::FRAME_BYTES_MAX;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};

/// Encodes one frame.
///
/// # Errors
/// `InvalidData` if the message is longer than [`FRAME_BYTES_MAX`].
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    encode_within(message, FRAME_BYTES_MAX)
}

/// Encodes one frame with another limit.
///
/// # Errors
/// `InvalidData` if the message is longer than `limit`.
pub fn encode_within<T: Serialize>(message: &T, limit: usize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n as usize <= limit);
    let length =
        length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "message longer than a frame may be"))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Removes the first frame from `buffer` and decodes it. Returns `None` if it is still incomplete.
///
/// # Errors
/// `InvalidData` if the frame is too long or does not contain the expected JSON.
pub fn take<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    take_within(buffer, FRAME_BYTES_MAX)
}

/// Does what [`take`] does, with another limit, in bytes.
///
/// # Errors
/// See [`take`].
pub fn take_within<T: DeserializeOwned>(buffer: &mut Vec<u8>, limit: usize) -> io::Result<Option<T>> {
    let Some(head) = buffer.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    if length > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("frame of {length} bytes is over the limit")));
    }
    let Some(body) = buffer.get(4..4 + length) else { return Ok(None) };
    let message = serde_json::from_slice(body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    buffer.drain(..4 + length);
    Ok(Some(message))
}

/// Writes one frame to a blocking stream.
///
/// # Errors
/// Those of [`encode`] and of the stream.
pub fn write<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    stream.write_all(&encode(message)?)
}

/// Reads one frame from a blocking stream.
///
/// # Errors
/// Those of [`take`] and of the stream; `UnexpectedEof` if it ends early.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    read_within(stream, FRAME_BYTES_MAX)
}

/// Reads a frame of at most `bytes_max` bytes. Memory is allocated as the bytes arrive, and not by
/// the claimed length.
///
/// # Errors
/// See [`read`].
pub fn read_within<T: DeserializeOwned>(stream: &mut impl Read, bytes_max: usize) -> io::Result<T> {
    let mut head = [0; 4];
    stream.read_exact(&mut head)?;
    let length = u32::from_le_bytes(head) as usize;
    if length > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("frame of {length} bytes is over the limit")));
    }
    let body = read_bytes(stream, length as u64)?;
    serde_json::from_slice(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Reads `length` bytes, allocating memory as they arrive.
///
/// # Errors
/// Those of the stream; `UnexpectedEof` if it ends early.
pub fn read_bytes(stream: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_whole_however_they_are_cut(texts in prop::collection::vec(".{0,40}", 0..8), cut in 1usize..9) {
            let bytes: Vec<u8> = texts.iter().flat_map(|t| encode(t).unwrap()).collect();
            let (mut buffer, mut seen) = (Vec::new(), Vec::<String>::new());
            for part in bytes.chunks(cut) {
                buffer.extend_from_slice(part);
                while let Some(text) = take(&mut buffer).unwrap() {
                    seen.push(text);
                }
            }
            prop_assert_eq!(seen, texts);
        }

        #[test]
        fn random_bytes_never_panic_or_allocate_much(mut bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = take::<serde_json::Value>(&mut bytes);
            let _ = read::<serde_json::Value>(&mut bytes.as_slice());
        }
    }
}

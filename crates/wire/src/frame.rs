//! Frames on unix sockets: four bytes of length (little endian), then that many bytes of JSON.

use crate::limits::FRAME_BYTES_MAX;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};

/// Encodes one frame.
///
/// # Errors
/// `InvalidData` when the message is longer than [`FRAME_BYTES_MAX`].
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    encode_within(message, FRAME_BYTES_MAX)
}

/// The same with another limit.
///
/// # Errors
/// `InvalidData` when the message is longer than `limit`.
pub fn encode_within<T: Serialize>(message: &T, limit: usize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n as usize <= limit);
    let length =
        length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "message longer than a frame may be"))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Takes the first complete frame off `buffer`; `None` when more bytes are needed.
///
/// # Errors
/// `InvalidData` for a frame that is too long or is not the expected JSON.
pub fn take<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    take_within(buffer, FRAME_BYTES_MAX)
}

/// The same with another limit.
///
/// # Errors
/// As [`take`].
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
/// As [`encode`], and those of the stream.
pub fn write<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    stream.write_all(&encode(message)?)
}

/// Reads one frame from a blocking stream.
///
/// # Errors
/// As [`take`], and those of the stream; `UnexpectedEof` when it ends.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    read_within(stream, FRAME_BYTES_MAX)
}

/// The same with a frame of at most so many bytes. Memory is taken as the bytes come, not as the length claims.
///
/// # Errors
/// As [`read`].
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

/// Reads so many bytes, taking memory as they come.
///
/// # Errors
/// Those of the stream; `UnexpectedEof` when it ends.
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

//! Samples in transit: a number from the catalogue and four bytes each, as base64 in a line of
//! JSON, about ten bytes per sample.

use data_encoding::BASE64_NOPAD;

/// Bytes of a sample.
const WIDTH: usize = 5;

/// Encodes samples for a line.
pub fn packed(samples: &[(u8, f32)]) -> String {
    let bytes: Vec<u8> =
        samples.iter().flat_map(|(metric, value)| std::iter::once(*metric).chain(value.to_le_bytes())).collect();
    BASE64_NOPAD.encode(&bytes)
}

/// Decodes the samples of a line. A truncated line yields none.
pub fn unpacked(text: &str) -> Vec<(u8, f32)> {
    let Some(bytes) = BASE64_NOPAD.decode(text.as_bytes()).ok().filter(|b| b.len().is_multiple_of(WIDTH)) else {
        return Vec::new();
    };
    let sample = |five: &[u8]| Some((*five.first()?, f32::from_le_bytes(five.get(1..)?.try_into().ok()?)));
    bytes.chunks(WIDTH).filter_map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_half_a_line_is_nothing() {
        let samples = vec![(0, 1.5), (3, -2.0e9), (255, f32::INFINITY)];
        let text = packed(&samples);
        assert_eq!(unpacked(&text), samples);
        assert_eq!(unpacked(&text[..text.len() - 2]), []);
        assert_eq!(unpacked("not base64!"), []);
        // With the rest of the line, including the time, less than twenty bytes per sample.
        let twelve = packed(&[(1, 1.0); 12]);
        assert!((twelve.len() + r#"{"Samples":{"at":1700000000000,"packed":""}}"#.len() + 1) / 12 < 20);
    }
}

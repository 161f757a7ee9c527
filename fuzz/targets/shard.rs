//! Headers of shard files (`checkpoint/format/shard.rs`, `tensor_parts.rs`), and side indexes of
//! slots (`index.rs`). An input is the JSON of headers that are read one after another, separated
//! by a byte that JSON never has; or that of an index.
//!
//! Reading must not panic. A header that is read after another one must give what it gives alone. A
//! header, its tables of places and checksums, and an index are written in a form that is read as
//! the same.
#![cfg_attr(fuzzing, no_main)]

use everstep_checkpoint::format::index::Index;
use everstep_checkpoint::format::shard::{
    CHUNKS_KEY, Lines, Metadata, PLACES_KEY, VALUES_KEY, chunks_from_text, chunks_to_text, parse_safetensors_header,
    values_from_text, values_to_text,
};
use everstep_checkpoint::format::tensor_parts::Places;
use everstep_fuzz::json::assert_stable;

everstep_fuzz::target!(check);

/// Between two headers.
const SEPARATOR: u8 = 0xff;
/// Bytes of a header before its JSON.
const LENGTH_BYTES: usize = 8;

fn check(input: &[u8]) {
    let mut lines = Lines::default();
    for json in input.split(|byte| *byte == SEPARATOR) {
        let found = parse_safetensors_header(json, &mut lines);
        assert_eq!(found, parse_safetensors_header(json, &mut Lines::default()));
        if let Ok((index, metadata)) = found {
            assert_header_stable(&index, &metadata);
            read_tables(&index, &metadata);
        }
    }
    if let Ok(index) = serde_json::from_slice::<Index>(input) {
        assert_stable(&index);
    }
}

fn assert_header_stable(index: &Index, metadata: &Metadata) {
    let header = index.safetensors_header(metadata).expect("what was read can be written");
    let json = header.get(LENGTH_BYTES..).expect("a header has a length");
    let (again, said) = parse_safetensors_header(json, &mut Lines::default()).expect("what was written can be read");
    // Empty tensors at one place may change order.
    assert_eq!(again.offsets(), index.offsets());
    assert_eq!(&said, metadata);
}

fn read_tables(index: &Index, metadata: &Metadata) {
    if let Some(sums) = metadata.get(CHUNKS_KEY).and_then(|text| chunks_from_text(text)) {
        assert_eq!(chunks_from_text(&chunks_to_text(&sums)).as_ref(), Some(&sums));
        let _ = index.clone().with_checksums(sums);
    }
    if let Some(places) = metadata.get(PLACES_KEY).and_then(|text| Places::from_text(text, index)) {
        for place in places.iter() {
            let tensor = index.tensors().get(place.number).expect("a place belongs to a tensor");
            assert!(place.part(tensor).fits(place.shape));
        }
    }
    if let Some(text) = metadata.get(VALUES_KEY) {
        let sums = values_from_text(text);
        assert_eq!(values_from_text(&values_to_text(&sums)), sums);
    }
}

//! The claims of a Parquet footer, and of the headers of pages. The reader of the `parquet` crate
//! goes through a list that it does not know element by element, as many as the list claims, also
//! where they take no bytes. Both are checked before.
//!
//! They are in Thrift's compact protocol. What the fields of a footer mean does not matter here.

/// Deepest nesting of a footer; the format has six levels.
const DEPTH_MAX: usize = 32;

/// Types of the compact protocol.
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const STRUCT: u8 = 12;

/// Returns whether every list of a footer may have as many elements as it claims. Anything else
/// that is wrong is left to the reader, which stops where this function stops.
pub fn is_plausible(footer: &[u8]) -> bool {
    !matches!(Bytes(footer).skip(STRUCT, DEPTH_MAX), Err(Stop::Claim))
}

/// Returns whether this begins with a complete header of a page. Where one ends too early, the
/// reader does not stop.
pub fn is_page_header(bytes: &[u8]) -> bool {
    Bytes(bytes).skip_known(&PAGE).is_ok()
}

/// Highest number of a field.
const FIELD_MAX: u64 = i16::MAX as u64;
/// Most values of a dictionary: writers stop at 1 MiB of them unless they are told otherwise.
const DICTIONARY_VALUES_MAX: u64 = 1 << 24;

/// What the fields of a struct are: their numbers and types, and the structs in them.
struct Fields(&'static [(u64, u8, Option<&'static Fields>)]);

/// `Statistics` of parquet.thrift.
static STATISTICS: Fields = Fields(&[
    (1, BINARY, None),
    (2, BINARY, None),
    (3, I64, None),
    (4, I64, None),
    (5, BINARY, None),
    (6, BINARY, None),
    (7, TRUE, None),
    (8, TRUE, None),
]);
/// `DataPageHeader`, `DictionaryPageHeader`, `DataPageHeaderV2`.
static DATA: Fields =
    Fields(&[(1, I32, None), (2, I32, None), (3, I32, None), (4, I32, None), (5, STRUCT, Some(&STATISTICS))]);
static DICTIONARY: Fields = Fields(&[(1, I32, None), (2, I32, None), (3, TRUE, None)]);
static DATA_V2: Fields = Fields(&[
    (1, I32, None),
    (2, I32, None),
    (3, I32, None),
    (4, I32, None),
    (5, I32, None),
    (6, I32, None),
    (7, TRUE, None),
    (8, STRUCT, Some(&STATISTICS)),
]);
/// `IndexPageHeader`. The format gives it no fields.
static INDEX: Fields = Fields(&[]);
/// `PageHeader`. None of these has a list.
static PAGE: Fields = Fields(&[
    (1, I32, None),
    (2, I32, None),
    (3, I32, None),
    (4, I32, None),
    (5, STRUCT, Some(&DATA)),
    (6, STRUCT, Some(&INDEX)),
    (7, STRUCT, Some(&DICTIONARY)),
    (8, STRUCT, Some(&DATA_V2)),
]);

/// Why a footer is not read to its end.
enum Stop {
    /// A list claims more elements than there are bytes.
    Claim,
    /// It is damaged in another way.
    Damaged,
}

/// The rest of a footer.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Result<u8, Stop> {
        let (first, rest) = self.0.split_first().ok_or(Stop::Damaged)?;
        self.0 = rest;
        Ok(*first)
    }

    fn drop_bytes(&mut self, count: u64) -> Result<(), Stop> {
        let count = usize::try_from(count).map_err(|_| Stop::Damaged)?;
        self.0 = self.0.get(count..).ok_or(Stop::Damaged)?;
        Ok(())
    }

    fn number(&mut self) -> Result<u64, Stop> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Stop::Damaged)
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Result<(), Stop> {
        let inner = depth.checked_sub(1).ok_or(Stop::Damaged)?;
        match kind {
            TRUE | FALSE => Ok(()),
            BYTE => self.drop_bytes(1),
            I16 | I32 | I64 => self.number().map(drop),
            DOUBLE => self.drop_bytes(8),
            BINARY => {
                let length = self.number()?;
                self.drop_bytes(length)
            }
            LIST | SET => self.skip_list(inner),
            STRUCT => self.skip_struct(inner),
            _ => Err(Stop::Damaged),
        }
    }

    fn skip_list(&mut self, depth: usize) -> Result<(), Stop> {
        let head = self.byte()?;
        let count = match head >> 4 {
            15 => self.number()?,
            short => u64::from(short),
        };
        // Every element takes a byte at least.
        if count > self.0.len() as u64 {
            return Err(Stop::Claim);
        }
        for _ in 0..count {
            match head & 0xf {
                // In a list, they are not part of the element's head.
                TRUE | FALSE => self.drop_bytes(1)?,
                kind => self.skip(kind, depth)?,
            }
        }
        Ok(())
    }

    /// Goes through a struct whose known fields have their types: the reader goes by their numbers
    /// alone. Any other field is a number, a text, or a truth.
    fn skip_known(&mut self, of: &Fields) -> Result<(), Stop> {
        let mut number = 0;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            match head >> 4 {
                0 => {
                    let zigzag = self.number()?;
                    number = if zigzag & 1 == 0 { zigzag >> 1 } else { return Err(Stop::Damaged) };
                }
                delta => number += u64::from(delta),
            }
            // The reader would drop the upper bits, and take it for another field.
            if number > FIELD_MAX {
                return Err(Stop::Damaged);
            }
            let kind = head & 0xf;
            let known = of.0.iter().find(|(n, _, _)| *n == number);
            let inner = known.and_then(|(_, _, inner)| *inner);
            let same = known.is_none_or(|(_, k, _)| *k == kind || (*k == TRUE && kind == FALSE));
            match (same, inner) {
                (true, Some(inner)) => self.skip_known(inner)?,
                // The reader allocates them before it reads them.
                (true, None) if number == 1 && std::ptr::eq(of, &raw const DICTIONARY) => {
                    if self.number()? >> 1 > DICTIONARY_VALUES_MAX {
                        return Err(Stop::Claim);
                    }
                }
                (true, None) if kind <= BINARY => self.skip(kind, 1)?,
                _ => return Err(Stop::Damaged),
            }
        }
    }

    fn skip_struct(&mut self, depth: usize) -> Result<(), Stop> {
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            if head >> 4 == 0 {
                // The number of the field stands alone.
                self.number()?;
            }
            self.skip(head & 0xf, depth)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_claims_more_than_there_is_is_found_wherever_it_is() {
        // Field 1: a number; field 2: a list of two structs, each with a text in field 1.
        let good = [0x15, 2, 0x19, 0x2c, 0x18, 1, b'a', 0, 0x18, 1, b'b', 0, 0];
        assert!(is_plausible(&good));
        let mut bad = good.to_vec();
        bad[3] = 0xec;
        assert!(!is_plausible(&bad), "14 elements in 9 bytes");
        // In a struct in a list: the second text becomes a list with a long count.
        let nested = [0x19, 0x1c, 0x19, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0];
        assert!(!is_plausible(&nested));
    }

    #[test]
    fn a_header_that_ends_too_early_is_none() {
        let header =
            [0x15, 0, 0x15, 4, 0x15, 4, 0x2c, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0x1c, 0x18, 1, b'a', 0, 0, 0];
        assert!(is_page_header(&header) && is_page_header(&[&header[..], b"data"].concat()));
        assert!((0..header.len()).all(|end| !is_page_header(&header[..end])));
        assert!(!is_page_header(&[0xf9, 0xf7, 0xff, 0xff, 0xff, 0xff, 0x07, 0]), "two billion numbers");
        assert!(!is_page_header(&[0x1c, 0, 0]), "a struct in place of a number");
        assert!(is_page_header(&[0x6c, 0, 0]) && !is_page_header(&[0x65, 0, 0]), "a number in place of a struct");
        // 65,537, in 16 bits, would be the first field.
        assert!(is_page_header(&[0x05, 0x12, 0, 0]) && !is_page_header(&[0x08, 0x82, 0x80, 0x08, 0, 0]));
    }

    #[test]
    fn other_damage_is_left_to_the_reader() {
        let deep = [0x1c; 2 * DEPTH_MAX];
        for left in [&b""[..], &deep, &[0x1d, 1], &[0x18, 9], &[0x15, 0xff, 0xff, 0xff, 0xff]] {
            assert!(is_plausible(left), "{left:?}");
        }
    }
}

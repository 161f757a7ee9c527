//! The same tables as Apache Parquet: flat columns of numbers and text.
//!
//! The reader of the `parquet` crate trusts a file in several ways: it panics where columns are
//! shorter than they claim, and goes through as many elements as a list claims. Here, a damaged
//! file is an error.

use super::csv::of_fields;
use super::footer;
use super::table::{Row, TableError};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes at the end of a file: the length of the footer, and `PAR1`.
const TAIL_BYTES: u64 = 8;
/// Length that the header of a page usually has at most, and that it may have.
const HEADER_BYTES: u64 = 4 << 10;
const HEADER_BYTES_MAX: u64 = 16 << 20;

fn text(of: &Field) -> String {
    match of {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::TimestampMillis(at) => (*at as f64 / 1e3).to_string(),
        Field::TimestampMicros(at) => (*at as f64 / 1e6).to_string(),
        other => other.to_string(),
    }
}

/// Returns all rows of a file.
///
/// # Errors
/// Fails if it is not a Parquet file, or lacks a column.
pub fn rows(file: impl ChunkReader + 'static) -> Result<impl Iterator<Item = Result<Row, TableError>>, TableError> {
    let footer = read(|| footer_of(&file))?;
    if !footer::is_plausible(&footer) {
        return Err(TableError::DamagedParquet("its footer is damaged"));
    }
    let reader = read(|| SerializedFileReader::new(Checked(file)))?;
    if !is_consistent(reader.metadata()) {
        return Err(TableError::DamagedParquet("its columns have different lengths, or are not flat"));
    }
    let schema = reader.metadata().file_metadata().schema_descr();
    let header: Vec<String> = schema.columns().iter().map(|c| c.name().to_owned()).collect();
    let mut rows = Some(RowIter::from_file_into(Box::new(reader)));
    let records = std::iter::from_fn(move || {
        let row = read(|| rows.as_mut().and_then(Iterator::next).transpose()).transpose()?;
        // After an error, the reader would not get any further.
        rows = rows.take().filter(|_| row.is_ok());
        Some(row.map(|row| row.get_column_iter().map(|(_, field)| text(field)).collect()))
    });
    of_fields(header, records)
}

/// Calls the reader, whose panics mean that the file is damaged.
fn read<T>(call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, TableError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => Ok(done?),
        Err(_) => Err(TableError::DamagedParquet("the file is damaged")),
    }
}

/// A file whose headers of pages are looked at before the reader reads them.
struct Checked<F>(F);

impl<F: Length> Length for Checked<F> {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl<F: ChunkReader> ChunkReader for Checked<F> {
    type T = F::T;

    /// The reader gets headers in this way, and what pages contain as bytes.
    fn get_read(&self, start: u64) -> Result<F::T, ParquetError> {
        let rest = self.len().saturating_sub(start);
        let begins_a_page = |most: u64| {
            let length = usize::try_from(rest.min(most)).unwrap_or_default();
            Ok::<_, ParquetError>(footer::is_page_header(&self.0.get_bytes(start, length)?))
        };
        // At the end is the length of the footer.
        if rest == TAIL_BYTES || begins_a_page(HEADER_BYTES)? || begins_a_page(HEADER_BYTES_MAX)? {
            return self.0.get_read(start);
        }
        Err(ParquetError::General("the header of a page is damaged".into()))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<bytes::Bytes, ParquetError> {
        self.0.get_bytes(start, length)
    }
}

/// Returns the footer, or nothing if there is none. The reader has the better message for that.
fn footer_of(file: &impl ChunkReader) -> Result<Vec<u8>, ParquetError> {
    let Some(tail_at) = file.len().checked_sub(TAIL_BYTES) else { return Ok(Vec::new()) };
    let tail = file.get_bytes(tail_at, TAIL_BYTES as usize)?;
    let length = tail.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
    let Some(start) = tail_at.checked_sub(u64::from(length)) else { return Ok(Vec::new()) };
    Ok(file.get_bytes(start, length as usize)?.to_vec())
}

/// Returns whether all columns of a row group have as many values as it has rows. The reader would
/// repeat the last value of a column that is too short.
fn is_consistent(metadata: &ParquetMetaData) -> bool {
    metadata.row_groups().iter().all(|group| group.columns().iter().all(|c| c.num_values() == group.num_rows()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, FloatType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use std::sync::Arc;

    #[test]
    fn a_table_is_read_with_its_gaps() {
        let schema = "message t { required double time; required binary machine (UTF8); optional float cpu; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let file = tempfile::tempfile().unwrap();
        let mut writer =
            SerializedFileWriter::new(file.try_clone().unwrap(), schema, Arc::new(WriterProperties::default()))
                .unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&[100.0, 101.0], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[ByteArray::from("a"), ByteArray::from("b")], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<FloatType>().write_batch(&[0.5], Some(&[1, 0]), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let all: Vec<Row> = rows(file).unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!((all[0].time, all[0].machine.as_str(), all[0].values[0].1), (100.0, "a", 0.5));
        assert!(all[1].machine == "b" && all[1].values[0].1.is_nan());
        assert!(rows(tempfile::tempfile().unwrap()).err().unwrap().to_string().contains("as Parquet"));
    }
}

//! The same tables as Apache Parquet: flat columns of numbers and text.

use super::csv::of_fields;
use super::table::Row;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use std::fs::File;

fn text(of: &Field) -> String {
    match of {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::TimestampMillis(at) => (*at as f64 / 1e3).to_string(),
        Field::TimestampMicros(at) => (*at as f64 / 1e6).to_string(),
        other => other.to_string(),
    }
}

/// All rows of a file.
///
/// # Errors
/// A sentence, when it is no such file, or lacks a column.
pub fn rows(file: File) -> Result<impl Iterator<Item = Result<Row, String>>, String> {
    let reader = SerializedFileReader::new(file).map_err(|e| format!("it cannot be read as Parquet: {e}"))?;
    let schema = reader.metadata().file_metadata().schema_descr();
    let header: Vec<String> = schema.columns().iter().map(|c| c.name().to_owned()).collect();
    let mut all = Vec::new();
    for row in reader.get_row_iter(None).map_err(|e| format!("it cannot be read as Parquet: {e}"))? {
        let row = row.map_err(|e| format!("it cannot be read as Parquet: {e}"))?;
        all.push(row.get_column_iter().map(|(_, field)| text(field)).collect::<Vec<String>>());
    }
    of_fields(header, all.into_iter().map(Ok))
}

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

/// Returns all rows of a file.
///
/// # Errors
/// Fails if it is not a Parquet file, or lacks a column.
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
        assert!(rows(tempfile::tempfile().unwrap()).err().unwrap().contains("as Parquet"));
    }
}

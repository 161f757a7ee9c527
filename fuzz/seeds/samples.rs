//! Tables of samples, as other programs write them.

use crate::Seeds;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::sync::Arc;

pub fn csv() -> Seeds {
    let wide = "time,machine,role,domain,cpu,gpu-duty\n1,a,x,r1,0.5,\n2026-01-31T12:00:00Z,b,x,r1,nan,1\n";
    let long = "machine, time, metric, value\na, 1, cpu, 0.5\nb, 1, cpu, 1\n\"c \"\"d\"\"\", 1.5, cpu, -1e3\n";
    let episodes = "time,machine,episode,fan\n0,a,one,1\n15,a,one,2\n30,a,one,3\n0,a,two,4\n";
    let wrong = "time,machine,cpu\nsoon,a,many\n";
    [("wide", wide), ("long", long), ("episodes", episodes), ("wrong", wrong)].map(|(n, t)| (n, t.into())).into()
}

pub fn parquet() -> Result<Seeds> {
    let seconds = "message t { required double time; required binary machine (UTF8); optional float cpu; }";
    let stamps = "message t { required int64 time (TIMESTAMP(MILLIS,true)); required binary machine (UTF8); \
                  optional float cpu; }";
    let plain = || WriterProperties::builder().set_dictionary_enabled(false);
    let dictionary = WriterProperties::builder;
    Ok(vec![
        ("plain", file::<DoubleType>(seconds, plain().build(), &[100.0, 101.0])?),
        ("dictionary", file::<DoubleType>(seconds, dictionary().build(), &[100.0, 100.5])?),
        (
            "snappy",
            file::<Int64Type>(stamps, dictionary().set_compression(Compression::SNAPPY).build(), &[1000, 2000])?,
        ),
        ("timestamps", file::<Int64Type>(stamps, plain().build(), &[1_700_000_000_000, 1_700_000_001_000])?),
    ])
}

/// Writes a table of two rows: their times, machines `a` and `b`, and one sample of the first.
fn file<T: DataType>(schema: &str, properties: WriterProperties, times: &[T::T]) -> Result<Vec<u8>> {
    let schema = Arc::new(parse_message_type(schema)?);
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    column::<T>(&mut group, times, None)?;
    column::<ByteArrayType>(&mut group, &[ByteArray::from("a"), ByteArray::from("b")], None)?;
    column::<FloatType>(&mut group, &[0.5], Some(&[1, 0]))?;
    group.close()?;
    writer.into_inner()
}

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, Vec<u8>>,
    values: &[T::T],
    present: Option<&[i16]>,
) -> Result<()> {
    let Some(mut column) = group.next_column()? else { return Ok(()) };
    column.typed::<T>().write_batch(values, present, None)?;
    column.close()
}

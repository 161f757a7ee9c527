//! Paths, arguments, and variables as the operating system represents them: bytes that are usually
//! text, and must arrive unchanged when they are not.

use data_encoding::HEXLOWER;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Marks a path in hexadecimal digits. No path contains this byte.
const NOT_TEXT: char = '\0';

/// A string of the operating system, serialized as text if it is UTF-8 and as a list of bytes
/// otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Raw(pub OsString);

impl<T: Into<OsString>> From<T> for Raw {
    fn from(value: T) -> Self {
        Raw(value.into())
    }
}

impl AsRef<OsStr> for Raw {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl AsRef<Path> for Raw {
    fn as_ref(&self) -> &Path {
        self.0.as_ref()
    }
}

impl Serialize for Raw {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => serializer.serialize_str(text),
            None => serializer.collect_seq(self.0.as_bytes()),
        }
    }
}

/// A [`Raw`] as it is serialized.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum Form {
    /// It is UTF-8.
    Text(String),
    /// It is not.
    Bytes(Vec<u8>),
}

impl JsonSchema for Raw {
    fn schema_name() -> Cow<'static, str> {
        "Raw".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Form::json_schema(generator)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Form::deserialize(deserializer).map(|form| match form {
            Form::Text(text) => Raw(text.into()),
            Form::Bytes(bytes) => Raw(OsString::from_vec(bytes)),
        })
    }
}

/// Encodes a path for a text field: unchanged if it is UTF-8.
#[must_use]
pub fn to_text(path: &Path) -> String {
    if let Some(text) = path.to_str() {
        return text.to_owned();
    }
    format!("{NOT_TEXT}{}", HEXLOWER.encode(path.as_os_str().as_bytes()))
}

/// Decodes a path encoded by [`to_text`].
#[must_use]
pub fn from_text(text: &str) -> PathBuf {
    let bytes = text.strip_prefix(NOT_TEXT).and_then(|digits| HEXLOWER.decode(digits.as_bytes()).ok());
    bytes.map_or_else(|| PathBuf::from(text), |bytes| PathBuf::from(OsString::from_vec(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_bytes_come_back(bytes in prop::collection::vec(1u8..=255, 0..40)) {
            let raw = Raw(OsString::from_vec(bytes));
            let json = serde_json::to_string(&raw).unwrap();
            prop_assert_eq!(&serde_json::from_str::<Raw>(&json).unwrap(), &raw);
            let path = PathBuf::from(raw.0);
            prop_assert_eq!(from_text(&to_text(&path)), path);
        }
    }
}

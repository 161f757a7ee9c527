//! The schemas in `docs/schema` are those of the types that are printed.
#![allow(clippy::unwrap_used)]

use everstep_wire::output::schemas;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// With this variable set, the files are written.
const WRITE: &str = "EVERSTEP_WRITE_SCHEMAS";

#[test]
fn the_schemas_that_are_checked_in_are_those_of_the_types() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema");
    let text = |schema: &schemars::Schema| serde_json::to_string_pretty(schema).unwrap() + "\n";
    let expected: BTreeMap<PathBuf, String> =
        schemas().iter().map(|of| (directory.join(format!("{}.json", of.name)), text(&of.schema))).collect();
    if std::env::var_os(WRITE).is_some() {
        std::fs::create_dir_all(&directory).unwrap();
        expected.iter().for_each(|(path, text)| std::fs::write(path, text).unwrap());
    }
    let files = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let found: BTreeMap<PathBuf, String> =
        files.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect();
    let names = |of: &BTreeMap<PathBuf, String>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected), "make schema writes them");
    for (path, text) in &expected {
        assert_eq!(found.get(path), Some(text), "{} is not up to date; make schema writes it", path.display());
    }
}

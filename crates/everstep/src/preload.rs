//! The Python files embedded in the binary: what a worker's interpreter finds first on its path.

use everstep_wire::private::{Directory, Root};
use std::path::Path;

/// Name of the program that imports torch and forks workers.
const TEMPLATE: &str = "template.py";
const TEMPLATE_DIRECTORY: &str = "warm";

/// Writes the files to `directory`.
///
/// # Errors
/// Those of the file system.
pub fn write(directory: &Path) -> std::io::Result<()> {
    let directory = Directory::root(directory, Root::Named)?;
    directory.write_whole("sitecustomize.py", include_str!("preload/sitecustomize.py").as_bytes())?;
    let warm = directory.make(TEMPLATE_DIRECTORY)?;
    warm.write_whole("frameworks.py", include_str!("preload/frameworks.py").as_bytes())?;
    warm.write_whole(TEMPLATE, include_str!("preload/template.py").as_bytes())
}

/// Returns the path of the template program. It is not next to `sitecustomize.py`, because nothing
/// else may be importable from there.
pub fn template(directory: &Path) -> std::path::PathBuf {
    directory.join(TEMPLATE_DIRECTORY).join(TEMPLATE)
}

//! Which Python runs what this binary starts.

use std::path::Path;

/// The interpreter: `PYTHON_EXEC`, else the one this binary was installed with, else that of the
/// active environment, else the path's.
pub fn python() -> String {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("python").display().to_string());
    let active = || std::env::var("VIRTUAL_ENV").ok().map(|v| format!("{v}/bin/python"));
    let found = |p: &String| Path::new(p).is_file();
    // The very name by which torchrun, installed beside us, calls it.
    let torchruns = || {
        let script = std::fs::read(std::env::current_exe().ok()?.parent()?.join("torchrun")).ok()?;
        let first = script.split(|b| *b == b'\n').next()?.strip_prefix(b"#!")?;
        String::from_utf8(first.to_vec()).ok().map(|p| p.trim().to_owned())
    };
    let beside = || torchruns().filter(found).or_else(beside);
    let given = std::env::var("PYTHON_EXEC").ok().filter(|p| !p.is_empty());
    given.or_else(|| beside().filter(found)).or_else(|| active().filter(found)).unwrap_or_else(|| "python3".into())
}

//! The Python interpreter for whatever this binary starts.

use std::env::{current_exe, var_os};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Returns the arguments with which Python runs one of everstep's modules. With `-m`, it would
/// import from the working directory first: from a checkpoint that somebody else made, for example.
pub fn module(name: &str) -> [String; 2] {
    let elsewhere = "if not getattr(sys.flags, 'safe_path', False): del sys.path[0]";
    let run = format!("runpy.run_module('everstep.{name}', run_name='__main__', alter_sys=True)");
    ["-c".into(), format!("import sys\n{elsewhere}\nimport runpy\n{run}")]
}

/// Returns the interpreter: `PYTHON_EXEC`, else the one this binary was installed with, else that
/// of the active environment, else the one in `PATH`.
pub fn python() -> OsString {
    let here = || Some(current_exe().ok()?.parent()?.to_path_buf());
    let beside = || here().map(|h| h.join("python"));
    let active = || var_os("VIRTUAL_ENV").map(|v| Path::new(&v).join("bin/python"));
    let found = |p: &PathBuf| p.is_file();
    // The exact path by which torchrun, if installed beside this binary, calls it.
    let torchruns = || {
        let script = std::fs::read(here()?.join("torchrun")).ok()?;
        let first = script.split(|b| *b == b'\n').next()?.strip_prefix(b"#!")?;
        Some(PathBuf::from(OsStr::from_bytes(first.trim_ascii())))
    };
    let beside = || torchruns().filter(found).or_else(beside);
    let given = var_os("PYTHON_EXEC").filter(|p| !p.is_empty());
    let other = || beside().filter(found).or_else(|| active().filter(found)).map(OsString::from);
    given.or_else(other).unwrap_or_else(|| "python3".into())
}

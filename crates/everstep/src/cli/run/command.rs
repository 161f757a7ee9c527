//! The workers' program: the interpreter, its options, and the user's own arguments.

use super::{Failure, RunOptions};
use crate::agent::launch::Entry;
use crate::interpreter::python;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Runs a script like `torch.distributed.run.run_script_path`, which records exceptions in the
/// error file.
const RUN_PATH: &str = "import runpy, sys; from torch.distributed.elastic.multiprocessing.errors import record; \
sys.argv = sys.argv[1:]; sys.path[0] = __import__('os').path.dirname(sys.executable); record(lambda: runpy.run_path(sys.argv[0], run_name='__main__'))()";

/// The program that a worker runs.
#[derive(Default)]
pub struct Program {
    /// Program and arguments, with macros not yet replaced.
    pub argv: Vec<OsString>,
    /// How a warm process can run the same program; `None` if it cannot.
    pub warm: Option<Entry>,
}

/// Returns the program that the options ask for.
///
/// # Errors
/// Fails if the script does not exist, or if options contradict each other.
pub fn program(o: &RunOptions) -> Result<Program, Failure> {
    let script = o.script.first().ok_or_else(|| Failure::usage("no script to run"))?;
    if o.module && o.no_python {
        return Err(Failure::usage("-m and --no-python cannot be used together; drop one of them"));
    }
    if o.run_path && (o.module || o.no_python) {
        return Err(Failure::usage("--run-path runs a file; it cannot be used with -m or --no-python"));
    }
    if !o.no_python && !o.module && !Path::new(script).exists() {
        return Err(Failure::usage(format!(
            "script {} does not exist; check the path, or use -m for a module",
            Path::new(script).display()
        )));
    }
    let (mut argv, warm) = match (o.no_python, o.run_path, o.module) {
        (true, ..) => (Vec::new(), None),
        (_, true, _) => (vec![python(), "-u".into(), "-c".into(), RUN_PATH.into()], None),
        (_, _, true) => (vec![python(), "-u".into(), "-m".into()], Some(Entry::Module)),
        _ => (vec![python(), "-u".into()], Some(Entry::Script).filter(|_| Path::new(script).is_file())),
    };
    argv.extend(o.script.iter().cloned());
    Ok(Program { argv, warm })
}

/// Returns the absolute path of the program that provides machines.
///
/// # Errors
/// Fails if the program does not exist or is not executable.
pub fn provisioner(path: &Path) -> Result<PathBuf, Failure> {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if rustix::fs::access(&whole, rustix::fs::Access::EXEC_OK).is_err() || whole.is_dir() {
        let why = format!("--provisioner {} cannot be started; give a program, with chmod +x", path.display());
        return Err(Failure::usage(why));
    }
    Ok(whole)
}

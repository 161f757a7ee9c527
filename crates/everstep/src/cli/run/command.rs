//! The workers' program: the interpreter, its options, and the user's own arguments.

use super::{Failure, Options};
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
pub fn program(o: &Options) -> Result<Program, Failure> {
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

/// Returns the number of workers that `--nproc-per-node` asks for.
///
/// # Errors
/// Fails if the text is neither a number nor a known word, or names a device that this machine
/// lacks.
pub fn workers(text: &str) -> Result<u32, Failure> {
    let cpus = || rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    let gpus = || {
        let named = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok();
        let count = std::fs::read_dir("/dev").into_iter().flatten().flatten().filter_map(named).count();
        match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) if count > 0 => list.split(',').filter(|d| !d.trim().is_empty()).count().min(count),
            _ => count,
        }
    };
    let gpus = || u32::try_from(gpus()).unwrap_or(0);
    match text {
        "cpu" => Ok(cpus()),
        "gpu" | "auto" => match (gpus(), text) {
            (0, "gpu") => {
                Err(Failure::usage("--nproc-per-node gpu, but this machine has no GPU; give a number or cpu"))
            }
            (0, _) => Ok(cpus()),
            (n, _) => Ok(n),
        },
        "xpu" => Err(Failure::usage("--nproc-per-node xpu, but this machine has no XPU; give a number or cpu")),
        number => match number.parse() {
            Ok(n) if (1..=4096).contains(&n) => Ok(n),
            _ => Err(Failure::usage(format!(
                "--nproc-per-node {number:?} is not a number of workers; give 1 or more, cpu, gpu or auto"
            ))),
        },
    }
}

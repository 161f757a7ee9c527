//! Export and import: torch knows its formats, so Python does them (`python/everstep/convert.py`).

use crate::cli::Failure;
use crate::cli::interpreter::python;
use clap::{Args, ValueEnum};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

/// What other tools read and write.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// torch.distributed.checkpoint: a directory
    Dcp,
    /// torch.save: a file
    Torch,
    /// safetensors files as Hugging Face's loaders expect them: weights only
    Hf,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::Dcp => "dcp",
            Format::Torch => "torch",
            Format::Hf => "hf",
        }
    }
}

#[derive(Args, Clone, Debug)]
pub struct Export {
    /// A directory of checkpoints, or one of them
    source: PathBuf,
    /// What to write; must not exist
    out: PathBuf,
    /// Which format
    #[arg(long)]
    to: Format,
    /// Which step; the newest when not given
    #[arg(long)]
    step: Option<u64>,
}

#[derive(Args, Clone, Debug)]
pub struct Import {
    /// What the other tool wrote
    source: PathBuf,
    /// A directory of checkpoints, in which the next one is made
    directory: PathBuf,
    /// Which format
    #[arg(long)]
    from: Format,
}

fn convert<'a>(arguments: impl IntoIterator<Item = &'a OsStr>) -> Result<i32, Failure> {
    let python = python();
    let status = Command::new(&python).args(["-m", "everstep.convert"]).args(arguments).status();
    let status =
        status.map_err(|e| Failure::config(format!("cannot run {}: {e}; set PYTHON_EXEC", python.display())))?;
    Ok(status.code().unwrap_or(1))
}

/// Writes what other tools read.
pub fn export(o: &Export) -> Result<i32, Failure> {
    let step = o.step.map(|s| s.to_string());
    let mut arguments = vec!["export".as_ref(), o.source.as_os_str(), o.out.as_os_str(), "--to".as_ref()];
    arguments.push(o.to.name().as_ref());
    if let Some(step) = &step {
        arguments.extend([OsStr::new("--step"), step.as_ref()]);
    }
    convert(arguments)
}

/// Reads what other tools wrote.
pub fn import(o: &Import) -> Result<i32, Failure> {
    convert([
        "import".as_ref(),
        o.source.as_os_str(),
        o.directory.as_os_str(),
        "--from".as_ref(),
        o.from.name().as_ref(),
    ])
}

//! Export and import. torch knows its own formats, so Python does the work
//! (`python/everstep/convert.py`).

use crate::failure::Failure;
use crate::interpreter::{module, python};
use clap::{Args, ValueEnum};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

/// Formats of other tools.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// torch.distributed.checkpoint (a directory)
    Dcp,
    /// torch.save (a file)
    Torch,
    /// Hugging Face safetensors files (weights only)
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
    /// Directory of checkpoints, or a single checkpoint
    source: PathBuf,
    /// Output path; must not exist
    out: PathBuf,
    /// Format to write
    #[arg(long)]
    to: Format,
    /// Step to export [default: the one that restore() would take]
    #[arg(long)]
    step: Option<u64>,
}

#[derive(Args, Clone, Debug)]
pub struct Import {
    /// Checkpoint of the other tool
    source: PathBuf,
    /// Directory of checkpoints in which to create the next one
    directory: PathBuf,
    /// Format to read
    #[arg(long)]
    from: Format,
}

fn convert<'a>(arguments: impl IntoIterator<Item = &'a OsStr>) -> Result<i32, Failure> {
    let python = python();
    let status = Command::new(&python).args(module("convert")).args(arguments).status();
    let status =
        status.map_err(|e| Failure::config(format!("cannot run {}: {e}; set PYTHON_EXEC", python.display())))?;
    Ok(status.code().unwrap_or(1))
}

/// Converts a checkpoint to another tool's format.
pub fn export(o: &Export) -> Result<i32, Failure> {
    let step = o.step.map(|s| s.to_string());
    let mut arguments = vec!["export".as_ref(), o.source.as_os_str(), o.out.as_os_str(), "--to".as_ref()];
    arguments.push(o.to.name().as_ref());
    if let Some(step) = &step {
        arguments.extend([OsStr::new("--step"), step.as_ref()]);
    }
    convert(arguments)
}

/// Converts another tool's checkpoint to one of everstep's.
pub fn import(o: &Import) -> Result<i32, Failure> {
    convert([
        "import".as_ref(),
        o.source.as_os_str(),
        o.directory.as_os_str(),
        "--from".as_ref(),
        o.from.name().as_ref(),
    ])
}

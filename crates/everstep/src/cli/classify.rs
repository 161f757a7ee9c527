//! `everstep classify`: classifies an error message, by the same table that decides on a running
//! job.

use super::{Failure, print_json};
use clap::Args;
use everstep_core::exit_code::ExitCode;
use everstep_core::severity::{Severity, Table};
use everstep_wire::output::{Classified, FIRST, KnownClass};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Args, Clone, Debug)]
pub struct ClassifyOptions {
    /// File with the error message [default: standard input]
    file: Option<PathBuf>,
    /// Your own error classes and patterns, checked before the built-in ones (TOML)
    #[arg(long, env = "EVERSTEP_FAILURE_TABLE", value_name = "FILE")]
    failure_table: Option<PathBuf>,
    /// Print the built-in table, a template for your own
    #[arg(long, conflicts_with = "file")]
    table: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Returns the built-in table, preceded by the rows of a file.
pub fn table(own: Option<&Path>) -> Result<Arc<Table>, Failure> {
    let built_in = Table::built_in();
    let Some(path) = own else { return Ok(built_in.clone()) };
    let written = crate::user_file::read(path)
        .map_err(|e| Failure::config(format!("cannot read --failure-table {}: {e}", path.display())))?;
    built_in
        .with(&written)
        .map(Arc::new)
        .map_err(|e| Failure::config(format!("--failure-table {}: {e}", path.display())))
}

fn read(file: Option<&Path>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    match file {
        Some(path) => bytes = std::fs::read(path)?,
        None => {
            std::io::stdin().read_to_end(&mut bytes)?;
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Describes the action that a severity asks for.
fn action(severity: Severity) -> &'static str {
    match severity {
        Severity::Sev1 => "exclude the machine and continue without it",
        Severity::Sev2 => "restart the processes",
        Severity::Sev3 => "wait in case it is transient, then restart the processes",
    }
}

/// Prints the class of a text.
pub fn run(o: &ClassifyOptions) -> Result<i32, Failure> {
    if o.table {
        print!("{}", Table::BUILT_IN);
        return Ok(0);
    }
    let table = table(o.failure_table.as_deref())?;
    let text = read(o.file.as_deref()).map_err(|e| Failure::usage(format!("cannot read the text: {e}")))?;
    let Some(found) = table.classify(&text) else {
        if o.json {
            print_json(&Classified { version: FIRST, class: None, known: None })?;
        }
        crate::say_warning!("no known error in this text; to add your own classes, see --failure-table");
        return Ok(ExitCode::Failed.number());
    };
    let class = found.class;
    if o.json {
        let known = KnownClass {
            scope: class.scope,
            severity: class.severity,
            follows: class.follows,
            what: class.what.clone(),
            advice: class.advice.clone(),
            line: found.line.to_owned(),
            source: found.source.to_owned(),
        };
        print_json(&Classified { version: FIRST, class: Some(class.name.clone()), known: Some(known) })?;
        return Ok(0);
    }
    let scope = class.scope.label();
    let follows = if class.follows { "; usually a consequence of a failure elsewhere" } else { "" };
    println!("{}  {} ({scope}{follows})", class.name, class.what);
    println!("  line      {}", found.line);
    println!("  response  {}", action(class.severity));
    println!("  advice    {}", class.advice);
    Ok(0)
}

//! `everstep schema`: the JSON schemas of the documents that other commands print.

use super::Failure;
use clap::Args;
use everstep_core::exit_code::ExitCode;
use everstep_wire::output::schemas;

#[derive(Args, Clone, Debug)]
pub struct SchemaOptions {
    /// Document whose schema to print [default: list all documents]
    document: Option<String>,
}

/// Prints a schema, or lists all documents and the commands that print them.
pub fn run(o: &SchemaOptions) -> Result<i32, Failure> {
    let all = schemas();
    let Some(name) = &o.document else {
        all.iter().for_each(|of| println!("{:<12} {}", of.name, of.printed_by));
        return Ok(0);
    };
    let Some(found) = all.into_iter().find(|of| of.name == name) else {
        return Err(Failure::usage(format!("there is no document {name}; everstep schema lists them")));
    };
    let failed = |e| Failure::new(ExitCode::Failed, format!("the schema cannot be written: {e}"));
    println!("{}", serde_json::to_string_pretty(&found.schema).map_err(failed)?);
    Ok(0)
}

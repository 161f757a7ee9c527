//! `everstep run --print-completion SHELL`.

use super::{Cli, Failure};
use clap::CommandFactory;
use clap_complete::{Shell, generate};

/// Prints a completion script for the whole command line.
pub fn print(shell: &str) -> Result<i32, Failure> {
    let mut command = Cli::command();
    let shell = match shell {
        "bash" => Shell::Bash,
        "zsh" => Shell::Zsh,
        "fish" => Shell::Fish,
        _ => {
            // tcsh has one line per command: here, the options of `run`.
            let run = command.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
            let names: Vec<&str> = run.filter_map(clap::Arg::get_long).collect();
            println!(
                "complete everstep 'c/--/({})/' 'p/1/(run status logs goodput doctor)/' 'n/*/f/'",
                names.join(" ")
            );
            return Ok(0);
        }
    };
    generate(shell, &mut command, "everstep", &mut std::io::stdout());
    Ok(0)
}

//! What `--help` shows: the commands by purpose, and for `everstep check` only what it uses.

use clap::Command;
use std::fmt::Write;

/// The commands by purpose, in the order in which they are shown.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Run", &["run", "check", "inject"]),
    ("Inspect", &["status", "logs", "explain", "incidents", "stacks", "goodput", "metrics", "classify", "schema"]),
    ("Checkpoints", &["ckpt", "memory"]),
    ("Plan", &["plan", "simulate", "size", "trace"]),
    ("Operate", &["approve", "detect", "notify", "doctor"]),
];

/// Ids of options of `run` that do not matter to `check`. It still accepts them, so that the
/// options of a job can be used for both.
const HIDDEN_FROM_CHECK: [&str; 35] = [
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "module",
    "no_python",
    "run_path",
    "log_dir",
    "redirects",
    "tee",
    "log_line_prefix_template",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
    "print_completion",
    "node_unit",
    "spares",
    "failure_domain",
    "failure_table",
    "policy",
    "provisioner",
    "detector",
    "cluster",
    "jobs",
    "check",
    "no_check",
    "exit_codes",
    "no_preload",
    "no_warm",
];

/// Returns the command line with its help arranged.
pub fn arranged(command: Command) -> Command {
    grouped(command).mut_subcommand("check", |check| {
        check
            .mut_args(|a| if HIDDEN_FROM_CHECK.contains(&a.get_id().as_str()) { a.hide(true) } else { a })
            .mut_arg("script", |a| a.hide(true))
            .override_usage("everstep check [OPTIONS]")
            .after_help("everstep run's other options are also accepted.")
    })
}

/// Returns the command line with its commands grouped in the help.
fn grouped(command: Command) -> Command {
    let width = GROUPS.iter().flat_map(|(_, names)| *names).map(|name| name.len()).max().unwrap_or(0);
    let mut list = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(list, "{group}:");
        for found in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = found.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(list, "  {:width$}  {about}", found.get_name());
        }
        list.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}\n\n\
         everstep COMMAND --help describes a command.\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    #[test]
    fn each_command_is_in_one_group() {
        let command = Cli::command();
        let mut shown: Vec<&str> =
            command.get_subcommands().filter(|c| !c.is_hide_set()).map(Command::get_name).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        shown.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(shown, grouped);
        let help = arranged(Cli::command()).render_help().to_string();
        assert!(shown.iter().all(|name| help.contains(&format!("\n  {name} "))), "{help}");
    }

    #[test]
    fn check_shows_the_options_that_it_uses() {
        let mut command = arranged(Cli::command());
        let check = command.find_subcommand_mut("check").unwrap();
        let known: Vec<&str> = check.get_arguments().map(|a| a.get_id().as_str()).collect();
        assert!(HIDDEN_FROM_CHECK.iter().all(|id| known.contains(id)), "{known:?}");
        let help = check.render_long_help().to_string();
        assert!(help.contains("--rdzv-endpoint") && help.contains("--token-file"), "{help}");
        assert!(!help.contains("SCRIPT") && !help.contains("--no-warm") && !help.contains("--tee"), "{help}");
    }
}

//! Normalizes the command line before it is parsed: accepts `_` for `-` and shortened option names
//! (as argparse does, and so torchrun), and leaves the script's own arguments alone.

use super::{Failure, RunOptions};
use clap::{Args, Command};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// The torch version whose torchrun options are known here.
pub const TORCH: &str = "2.15";
/// Options of `everstep run` that torchrun does not have. A shortened name never stands for one of
/// these.
const OURS: &[&str] = &[
    "node-unit",
    "spares",
    "failure-domain",
    "store",
    "detect-timeout",
    "join-timeout",
    "insecure",
    "token-file",
    "name",
    "exit-codes",
    "no-preload",
    "no-warm",
    "check",
    "policy",
    "provisioner",
    "detector",
    "cluster",
    "jobs",
    "no-check",
    "notify",
    "kernel-log",
    "failure-table",
];

struct Known {
    /// Long names, each with whether a value follows.
    long: Vec<(String, bool)>,
    short: Vec<(char, bool)>,
}

fn known() -> Known {
    let command = RunOptions::augment_args(Command::new("run"));
    let takes = |a: &clap::Arg| a.get_action().takes_values();
    let mut long: Vec<(String, bool)> =
        command.get_arguments().filter_map(|a| Some((a.get_long()?.to_owned(), takes(a)))).collect();
    long.push(("help".into(), false));
    let mut short: Vec<(char, bool)> =
        command.get_arguments().filter_map(|a| Some((a.get_short()?, takes(a)))).collect();
    short.push(('h', false));
    Known { long, short }
}

impl Known {
    /// Returns the option that `name` stands for: an exact match, or a prefix of exactly one of
    /// torchrun's names.
    fn resolve(&self, name: &str) -> Result<(String, bool), Failure> {
        let plain = name.replace('_', "-");
        if let Some(found) = self.long.iter().find(|(n, _)| *n == plain) {
            return Ok(found.clone());
        }
        let begins: Vec<&(String, bool)> =
            self.long.iter().filter(|(n, _)| n.starts_with(&plain) && !OURS.contains(&n.as_str())).collect();
        match begins[..] {
            [one] => Ok(one.clone()),
            [] => {
                let near = |(n, _): &&(String, bool)| (strsim::jaro_winkler(n, &plain) * 1000.0) as u32;
                // A name far from all known ones is not a misspelling of one.
                let nearest = self.long.iter().max_by_key(near).filter(|n| near(n) >= 880);
                let guess = nearest.map_or_else(String::new, |(n, _)| format!("; did you mean --{n}?"));
                Err(Failure::usage(format!(
                    "unknown option --{name}{guess} (everstep run --help lists torchrun's options, torch {TORCH}, and everstep's own)"
                )))
            }
            _ => {
                let names: Vec<String> = begins.iter().map(|(n, _)| format!("--{n}")).collect();
                Err(Failure::usage(format!(
                    "--{name} is ambiguous: it can mean {}; write the option in full",
                    names.join(" or ")
                )))
            }
        }
    }
}

/// Returns the arguments after `everstep run`, ready to be parsed.
///
/// # Errors
/// Fails if an option is unknown, and suggests the nearest known one.
pub fn uniform(arguments: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let known = known();
    let mut result = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        // The name of an option is UTF-8; its value, or a script, may not be.
        let bytes = argument.as_bytes();
        let text = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        let script: Option<&OsString> = if argument == "--" {
            rest.next()
        } else if let Some(name) = text.strip_prefix("--") {
            let name = name.split_once('=').map_or(name, |(name, _)| name);
            let given = bytes.get(2 + name.len() + 1..).map(OsStr::from_bytes);
            let (name, takes_value) = known.resolve(name)?;
            match given {
                // The parser itself rejects `--flag=x`.
                Some(value) => {
                    let mut whole = OsString::from(format!("--{name}="));
                    whole.push(value);
                    result.push(whole);
                }
                None => {
                    result.push(format!("--{name}").into());
                    if takes_value {
                        result.extend(rest.next().cloned());
                    }
                }
            }
            continue;
        } else if let Some(letters) = text.strip_prefix('-').filter(|l| !l.is_empty()) {
            let first = letters.chars().next().unwrap_or_default();
            let Some((_, takes_value)) = known.short.iter().find(|(s, _)| *s == first) else {
                return Err(Failure::usage(format!(
                    "unknown option {text}; everstep run --help lists torchrun's options (torch {TORCH}) and everstep's own"
                )));
            };
            result.push(format!("-{first}").into());
            let attached = bytes.get(1 + first.len_utf8()..).unwrap_or_default();
            let attached = attached.strip_prefix(b"=").unwrap_or(attached);
            match (*takes_value, attached.is_empty()) {
                (true, true) => result.extend(rest.next().cloned()),
                (true, false) => result.push(OsStr::from_bytes(attached).to_owned()),
                (false, true) => {}
                (false, false) => {
                    return Err(Failure::usage(format!("-{first} takes no value, but {text} has one")));
                }
            }
            continue;
        } else {
            Some(argument)
        };
        if let Some(script) = script {
            result.push("--".into());
            result.push(script.clone());
            result.extend(rest.by_ref().cloned());
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(given: &str) -> Result<String, String> {
        let given: Vec<OsString> = given.split(' ').map(OsString::from).collect();
        let text = |all: Vec<OsString>| all.join(OsStr::new(" ")).into_string().unwrap();
        uniform(&given).map(text).map_err(|f| f.why)
    }

    #[test]
    fn both_spellings_are_taken_and_the_scripts_arguments_are_left_alone() {
        let got = of("--nproc_per_node 2 --rdzv_id=a_b --standalone train_me.py --my_flag --nnodes").unwrap();
        assert_eq!(got, "--nproc-per-node 2 --rdzv-id=a_b --standalone -- train_me.py --my_flag --nnodes");
        assert_eq!(of("-t 3 -m pkg.train -x").unwrap(), "-t 3 -m -- pkg.train -x");
        assert_eq!(of("-r1 -t=2 t.py").unwrap(), "-r 1 -t 2 -- t.py");
        assert_eq!(of("-- train.py -- a").unwrap(), "-- train.py -- a");
    }

    #[test]
    fn shortened_names_mean_what_they_mean_to_torchrun() {
        assert_eq!(
            of("--nproc 2 --master_p=1 --node 1 t.py").unwrap(),
            "--nproc-per-node 2 --master-port=1 --node-rank 1 -- t.py"
        );
        assert!(of("--no 2 t.py").unwrap_err().contains("--node-rank"));
    }

    #[test]
    fn an_unknown_option_is_named_with_the_nearest() {
        let why = of("--nproc-per-nod3 2 t.py").unwrap_err();
        assert!(why.contains("--nproc-per-nod3") && why.contains("--nproc-per-node") && why.contains("2.15"), "{why}");
        assert!(of("-q t.py").unwrap_err().contains("-q"));
    }
}

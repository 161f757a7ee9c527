//! The everstep binary: every role is a subcommand.

// First, because the other modules use its macros.
#[macro_use]
mod print;

mod agent;
mod children;
mod cli;
mod coordinator;
mod descriptors;
mod events_file;
mod failure;
mod file_size;
mod guard;
mod interpreter;
mod listening;
mod lock;
mod log;
mod metrics;
mod notify;
mod paths;
mod preload;
mod provisioner;
mod signals;
mod slow_storage;
mod store;
mod tcp_store;
mod time_ledger;

use everstep::{detect, user_file};

fn main() {
    children::keep();
    file_size::report();
    let code = cli::main();
    log::flush();
    std::process::exit(code);
}

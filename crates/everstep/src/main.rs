//! The everstep binary: every role is a subcommand.

mod agent;
mod books;
mod cli;
mod coordinator;
mod descriptors;
mod detect;
mod guard;
mod listening;
mod lock;
mod metrics;
mod notify;
mod pgstore;
mod places;
mod preload;
mod provisioner;
mod say;
mod store;

fn main() {
    std::process::exit(cli::main());
}

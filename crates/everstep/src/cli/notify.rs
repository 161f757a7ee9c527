//! `everstep notify`: tests whether notices reach the routes of a file for `--notify`.

use super::{Failure, runtime};
use crate::notify::{Sender, routes, test_notice};
use clap::Args;
use everstep_core::notify::Status;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub struct NotifyOptions {
    /// File of routes, as for everstep run --notify (TOML)
    file: PathBuf,
}

/// Sends a test message to each route, and then resolves it.
pub fn run(o: &NotifyOptions) -> Result<i32, Failure> {
    let routes = routes::read(&o.file).map_err(Failure::config)?;
    let failed = runtime()?.block_on(async {
        let mut failed = 0;
        for route in routes {
            let name = route.name();
            let mut sender = Sender::new(route);
            let mut notice = test_notice(Status::Person);
            let mut sent = sender.send(&notice).await;
            if sent.is_ok() {
                (notice.status, notice.ended) = (Status::Resolved, Some(notice.opened));
                sent = sender.send(&notice).await;
            }
            match sent {
                Ok(()) => println!("{name}: delivered"),
                Err(why) => {
                    println!("{name}: not delivered: {why}");
                    failed += 1;
                }
            }
        }
        failed
    });
    Ok(i32::from(failed > 0))
}

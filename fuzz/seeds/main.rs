//! Writes the corpora: a few small inputs per target, from the encoders of the product.
//!
//! ```text
//! cargo run -p everstep-fuzz --example seeds
//! ```
//!
//! Run it after a format has changed, and commit what changes in `fuzz/corpus`. Files of other
//! names are kept.

mod checkpoint;
mod failures;
mod http;
mod samples;
mod store;
mod wire;

use std::error::Error;
use std::fs;
use std::path::Path;

/// Inputs of one target, by file name.
type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Most inputs of a target.
const SEEDS_MAX: usize = 20;
/// Longest input.
const BYTES_MAX: usize = 4 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let corpora = [
        ("frame", wire::frames()?),
        ("worker", wire::worker_messages()?),
        ("envelope", wire::lines()?),
        ("server", http::requests()?),
        ("store", store::sessions()),
        ("manifest", checkpoint::manifests()?),
        ("shard", checkpoint::headers()?),
        ("failures", failures::tables()),
        ("samples_csv", samples::csv()),
        ("samples_parquet", samples::parquet()?),
        ("planted", vec![("other", b"something else".to_vec())]),
    ];
    for (target, seeds) in corpora {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        fs::create_dir_all(&directory)?;
        assert!(seeds.len() <= SEEDS_MAX, "{target} has {} seeds, more than {SEEDS_MAX}", seeds.len());
        for (name, bytes) in seeds {
            assert!(bytes.len() <= BYTES_MAX, "{target}/{name} has {} bytes, more than {BYTES_MAX}", bytes.len());
            fs::write(directory.join(name), bytes)?;
        }
    }
    Ok(())
}

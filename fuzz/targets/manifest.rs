//! Manifests of checkpoints (`checkpoint/format/manifest.rs`). An input is the bytes of a manifest,
//! or what its checksum covers, which mutations would hardly ever get right.
//!
//! Reading must not panic. A manifest that was read is written in a form that is read as the same,
//! its lengths can be added up, and whatever is written has the right checksum.
#![cfg_attr(fuzzing, no_main)]

use everstep_checkpoint::format::manifest::{Manifest, ManifestError};
use everstep_core::id::RunId;

everstep_fuzz::target!(check);

fn check(input: &[u8]) {
    if let Ok(manifest) = Manifest::from_bytes(input) {
        assert_eq!(reread(&manifest).as_ref(), Ok(&manifest));
    }
    let Ok(manifest) = serde_json::from_slice::<Manifest>(input) else { return };
    match reread(&manifest) {
        Ok(again) => {
            assert_eq!(again, manifest);
            use_it(&again);
        }
        Err(e) => assert!(!matches!(e, ManifestError::Checksum | ManifestError::TooLong(_)), "{e}"),
    }
}

fn reread(manifest: &Manifest) -> Result<Manifest, ManifestError> {
    Manifest::from_bytes(&manifest.to_bytes().expect("what was read can be written"))
}

/// Asks what readers ask of a manifest.
fn use_it(manifest: &Manifest) {
    assert!(manifest.shards.iter().all(|shard| shard.bytes <= manifest.bytes()));
    let run = manifest.writer.map_or(RunId(0), |writer| writer.run);
    for exactly in [false, true] {
        let _ = manifest.stands_for(manifest, run, exactly);
    }
    if let Some(lineage) = &manifest.lineage {
        let (branch, forks) = lineage.at(manifest.step);
        assert!(branch == lineage.branch || forks.len() < lineage.forks.len());
    }
}

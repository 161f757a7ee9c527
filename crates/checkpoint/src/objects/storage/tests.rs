use super::*;
use crate::format::manifest::VERSION;
use crate::lineage::Lineage;
use crate::objects::bucket::{failed, keep_in_memory, wait};
use crate::persist::{self, Origin, still_owned};
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use object_store::ObjectStoreExt;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::Path;

/// A prefix in a bucket in memory, owned by epoch 1.
struct Prefix {
    url: String,
    at: Location,
    mark: Mark,
}

impl Prefix {
    fn new(bucket: &str, conditional: bool) -> Self {
        let root = format!("s3://{bucket}");
        keep_in_memory(&[&root, &format!("s3a://{bucket}")], conditional);
        let url = format!("{root}/run");
        let at = Location::of(Path::new(&url)).unwrap();
        let mark = Mark { run: persist::run_id(Path::new(&url)).unwrap(), epoch: 1, generation: 1, attempt: 0 };
        let prefix = Prefix { url, at, mark };
        prefix.put("owners/1.json", b"{}");
        prefix
    }

    fn path(&self) -> &Path {
        Path::new(&self.url)
    }

    fn put(&self, name: &str, bytes: &'static [u8]) {
        wait(async { self.at.bucket.store.put(&self.at.join(name), bytes.into()).await.map_err(failed) }).unwrap();
    }

    /// Puts a shard as `generation` would write it, and returns its description.
    fn shard(&self, step: u64, generation: u64, purpose: Purpose) -> ShardFile {
        let file = format!("1.{generation}-00ff/rank-0.safetensors");
        self.put(&format!("step-{step}/{file}"), b"0");
        ShardFile { rank: Rank(0), file, bytes: 1, crc: String::new(), purpose, objects: BTreeSet::new() }
    }

    /// Returns the manifest of an automatic checkpoint in branch 1.
    fn manifest(&self, step: u64, generation: u64, saved_at: u64) -> Manifest {
        Manifest {
            version: VERSION,
            step,
            world_size: 1,
            saved_at,
            writer: Some(Mark { generation, ..self.mark }),
            lineage: Some(Lineage { branch: 1, turn: 1, forks: Vec::new() }),
            shards: vec![self.shard(step, generation, Purpose::Recovery)],
        }
    }

    /// Saves a step like a job.
    fn save(&self, step: u64, generation: u64, target: Target) -> PathBuf {
        let purpose = if target == Target::Exactly { Purpose::User } else { Purpose::Recovery };
        let shards = [self.shard(step, generation, purpose)];
        persist::publish(self.path(), &Mark { generation, ..self.mark }, step, &shards, target).unwrap()
    }

    /// Returns the checkpoints that training continues from, and whether they can be read.
    fn line(&self) -> Vec<(u64, bool)> {
        persist::line(self.path()).unwrap().into_iter().map(|(step, _, m)| (step, m.is_ok())).collect()
    }

    fn publish(&self, manifest: &Manifest, owned: StillOwned<'_>) -> io::Result<PathBuf> {
        self.at.publish(&manifest.writer.unwrap(), manifest, Target::Branch, owned)
    }

    /// Behaves like an owner that loses the prefix right after its first check.
    fn lost_after_a_look(&self) -> impl Fn() -> io::Result<()> {
        || {
            let seen = still_owned(self.path(), &self.mark);
            self.put("owners/2.json", b"{}");
            seen
        }
    }

    /// Returns the names and generations of the published checkpoints.
    fn published(&self) -> Vec<(String, u64)> {
        let found = self.at.list().unwrap().into_iter();
        let name = |path: PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        found.map(|(_, path, m)| (name(path), m.unwrap().writer.unwrap().generation)).collect()
    }
}

/// Returns a check that succeeds the first time and fails the second time.
fn then(fails: impl Fn() -> io::Error) -> impl Fn() -> io::Result<()> {
    let looked = Cell::new(false);
    move || if looked.replace(true) { Err(fails()) } else { Ok(()) }
}

#[test]
fn what_is_put_after_another_job_took_the_prefix_over_is_withdrawn() {
    for (bucket, conditional) in [("lost", true), ("lost-unconditional", false)] {
        let prefix = Prefix::new(bucket, conditional);
        prefix.publish(&prefix.manifest(15, 1, 100), &|| Ok(())).unwrap();
        let lost = prefix.publish(&prefix.manifest(20, 1, 110), &prefix.lost_after_a_look()).unwrap_err();
        assert!(lost.to_string().contains("taken over"), "{lost}");
        assert_eq!(prefix.at.list().unwrap().iter().map(|f| f.0).collect::<Vec<_>>(), [15]);
    }
}

#[test]
fn a_put_whose_answer_was_lost_is_withdrawn_too() {
    let prefix = Prefix::new("unanswered", true);
    let manifest = prefix.manifest(20, 1, 110);
    // The retry of a put that was done finds its own manifest there.
    prefix.publish(&manifest, &|| Ok(())).unwrap();
    prefix.publish(&manifest, &prefix.lost_after_a_look()).unwrap_err();
    assert_eq!(prefix.published(), []);
    // No retry is answered either.
    let mut created = None;
    commit::publish(&prefix.at, &prefix.mark, &manifest, Target::Branch, &mut created).unwrap();
    let unanswered = Err(io::Error::from(io::ErrorKind::TimedOut));
    let lost = settle(&prefix.at, &manifest, unanswered, created, &|| still_owned(prefix.path(), &prefix.mark));
    assert!(is_lost(&lost.unwrap_err()));
    assert_eq!(prefix.published(), []);
}

#[test]
fn what_replaced_a_durable_step_stays() {
    let prefix = Prefix::new("replaced", true);
    prefix.publish(&prefix.manifest(20, 1, 100), &|| Ok(())).unwrap();
    let again = prefix.manifest(20, 2, 110);
    prefix.publish(&again, &prefix.lost_after_a_look()).unwrap_err();
    assert_eq!(prefix.published(), [("step-20".into(), 2)]);
    // Published a second time, it is not treated as new.
    let later = Manifest { saved_at: 120, ..again };
    prefix.publish(&later, &then(|| still_owned(prefix.path(), &prefix.mark).unwrap_err())).unwrap_err();
    assert_eq!(prefix.published(), [("step-20".into(), 2)]);
}

#[test]
fn what_the_new_owner_put_in_its_place_stays() {
    let prefix = Prefix::new("overtaken", true);
    let overtaken = || {
        prefix.put("owners/2.json", b"{}");
        let theirs =
            Manifest { writer: Some(Mark { epoch: 2, generation: 7, ..prefix.mark }), ..prefix.manifest(20, 7, 130) };
        prefix.publish(&theirs, &|| Ok(())).unwrap();
        still_owned(prefix.path(), &prefix.mark).unwrap_err()
    };
    prefix.publish(&prefix.manifest(20, 1, 110), &then(overtaken)).unwrap_err();
    assert_eq!(prefix.published(), [("step-20".into(), 7)]);
}

#[test]
fn a_look_that_fails_withdraws_nothing() {
    let prefix = Prefix::new("unseen", true);
    let expired = || {
        let source = "the token has expired".into();
        failed(object_store::Error::Unauthenticated { path: "owners".into(), source })
    };
    for (step, fails) in [(10, expired as fn() -> io::Error), (20, || io::ErrorKind::TimedOut.into())] {
        prefix.publish(&prefix.manifest(step, 1, 100), &then(fails)).unwrap_err();
    }
    assert_eq!(prefix.published(), [("step-10".into(), 1), ("step-20".into(), 1)]);
}

#[test]
fn a_damaged_step_is_not_hidden_by_that_of_another_branch() {
    let prefix = Prefix::new("damaged", true);
    let ten = prefix.save(10, 1, Target::Branch);
    prefix.save(20, 1, Target::Branch);
    let ten = persist::read_manifest(&ten).unwrap();
    persist::begin(prefix.path(), Origin::Durable(&ten), true, &Mark { generation: 2, ..prefix.mark }).unwrap();
    assert!(prefix.save(20, 2, Target::Branch).ends_with("step-20.2"));
    assert_eq!(prefix.line(), [(20, true), (10, true)]);
    prefix.put("manifests/step-20.2.json", b"{}");
    assert_eq!(prefix.line(), [(20, false), (10, true)]);
}

#[test]
fn a_damaged_step_is_not_hidden_by_a_save_through_dcp() {
    let prefix = Prefix::new("damaged-beside-dcp", true);
    prefix.save(20, 1, Target::Exactly);
    assert!(prefix.save(20, 1, Target::Branch).ends_with("step-20.2"));
    prefix.put("manifests/step-20.2.json", b"{}");
    assert_eq!(prefix.line(), [(20, false)]);
}

#[test]
fn another_spelling_of_a_url_is_no_copy() {
    let prefix = Prefix::new("spelled", true);
    let run = |url: &str| persist::run_id(Path::new(url)).unwrap();
    let record = || prefix.at.recall(persist::RUN_FILE).unwrap().unwrap();
    let before = record();
    for url in ["s3a://spelled/run", "s3://spelled/run/", "s3://spelled//run", "s3a://spelled//run//"] {
        assert_eq!(run(url), prefix.mark.run, "{url}");
        assert_eq!(record(), before, "{url}");
    }
    still_owned(prefix.path(), &prefix.mark).unwrap();
    // Recorded by an earlier build.
    let given = |url: &str| String::from_utf8(before.clone()).unwrap().replace("s3://spelled/run", url).into_bytes();
    prefix.at.replace(persist::RUN_FILE, given("s3a://spelled//run")).unwrap();
    assert_eq!(run("s3://spelled/run"), prefix.mark.run);
    prefix.at.replace(persist::RUN_FILE, given("s3://spelled/original")).unwrap();
    assert_ne!(run("s3://spelled/run"), prefix.mark.run, "copied from another prefix");
}

#[test]
fn names_of_one_store_are_one_home() {
    let home = |path: &str| Home { path: path.into(), inode: None, created: None, written: 0 };
    for other in ["azure://c/run", "abfs://c/run", "abfss://c/run", "adl://c/run"] {
        assert!(!home("az://c/run").is_copy_of(&home(other)), "{other}");
    }
    for other in ["az://d/run", "az://c/run/2", "s3://c/run", "abfss://c@account.dfs.core.windows.net/run"] {
        assert!(home("az://c/run").is_copy_of(&home(other)), "{other}");
    }
    assert!(home("/a/s3a://c/run").is_copy_of(&home("/a/s3://c/run")), "directories");
}

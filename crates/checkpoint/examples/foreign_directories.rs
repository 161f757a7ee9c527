//! Random sequences of publish, prune, restore and save by two jobs, in directories with foreign,
//! damaged, linked and half-written entries, while calls to the file system fail.
//! `foreign_directories SEQUENCES SEED [planted]`: prints what was found as JSON; `planted` deletes
//! by the old rule (whatever is called `step-N` and has no manifest), which must be found out.
#![allow(clippy::unwrap_used, reason = "a test may end where it stands")]

use everstep_checkpoint::arena::{Label, Pin, Slot, job_hash, slot_bytes};
use everstep_checkpoint::capture::{Described, Plan, Source, start};
use everstep_checkpoint::direct_io::Throttle;
use everstep_checkpoint::format::index::Tensor;
use everstep_checkpoint::format::mark::Mark;
use everstep_checkpoint::persist::{self, Origin, Target, faults};
use everstep_checkpoint::restore::Shard;
use everstep_checkpoint::retain::Policy;
use everstep_core::id::Rank;
use everstep_core::message::Purpose;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const KEEP: usize = 2;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ESTALE: i32 = 116;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n
    }
}

/// Everything that there is at a path, by names, kinds, inodes and contents.
fn fingerprint(path: &Path, into: &mut DefaultHasher) {
    let Ok(about) = path.symlink_metadata() else { return "absent".hash(into) };
    (path, about.mode(), about.ino()).hash(into);
    if about.is_symlink() {
        fs::read_link(path).unwrap().hash(into);
    } else if about.is_dir() {
        let mut all: Vec<PathBuf> = fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).collect();
        all.sort();
        all.iter().for_each(|p| fingerprint(p, into));
    } else if about.is_file() {
        fs::read(path).unwrap().hash(into);
    }
}

fn hash(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    fingerprint(path, &mut hasher);
    hasher.finish()
}

/// One sequence: a directory, what must stay in it, and what the job knows.
struct World {
    out: PathBuf,
    slot: Arc<Slot>,
    /// Foreign and user-owned entries, by what they were.
    protected: BTreeMap<PathBuf, u64>,
    mark: Mark,
    step: u64,
    /// Claimed durable steps of the running branch, in order.
    claimed: Vec<u64>,
    /// Steps whose publication failed, perhaps after they had become visible.
    unclaimed: BTreeSet<u64>,
    /// Branches that the user left: their steps.
    abandoned: BTreeSet<PathBuf>,
    /// What the user saved: step, generation, branch.
    saved: BTreeMap<PathBuf, (u64, u64, u64)>,
    branch: u64,
    faults: u64,
    found: Vec<String>,
}

fn captured(slot: &Arc<Slot>, step: u64, purpose: Purpose, branch: u64) {
    slot.release(Pin::Persist);
    let data = [step as u8 ^ branch as u8; 64];
    let tensors = vec![Tensor { name: "a".into(), dtype: "U8".into(), shape: vec![64], bytes: 64 }];
    let label = Label { run: job_hash("j"), rank: 0, world_size: 1, generation: 1, step, purpose, shared: false };
    let sources = vec![Source { address: data.as_ptr() as usize, bytes: 64, eager: true }];
    let tensors = Described::of(&tensors).unwrap();
    let plan = Plan { tensors, sources, label, persist: true, threads: 1, background: false, compare: false };
    // SAFETY: `data` lives and stays unchanged until `wait` has returned.
    unsafe { start(slot.clone(), plan, None) }.unwrap().wait().unwrap();
}

impl World {
    fn foreign(&mut self, random: &mut Random) {
        for _ in 0..random.below(6) {
            let step = random.below(14);
            let kind = random.below(12);
            let name = match random.below(6) {
                0 => format!("step-{step}.tmp-0.{}", random.below(3)),
                1 => format!("step-{step}.gone-{:016x}", random.below(u64::MAX)),
                2 => format!("step-{step}.{}", 2 + random.below(3)),
                3 => format!("step-0{step}"),
                _ => format!("step-{step}"),
            };
            let path = self.out.join(name);
            if path.symlink_metadata().is_ok() {
                continue;
            }
            match kind {
                0 => fs::write(&path, b"a file").unwrap(),
                1 => symlink(self.slot.path().with_file_name("elsewhere"), &path).unwrap(),
                2 => rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap(),
                3 => fs::create_dir(&path).unwrap(),
                4 => {
                    // Another run's checkpoint, copied here.
                    fs::create_dir(&path).unwrap();
                    for file in fs::read_dir(self.slot.path().with_file_name("other").join("step-1")).unwrap() {
                        let file = file.unwrap();
                        fs::copy(file.path(), path.join(file.file_name())).unwrap();
                    }
                }
                5 => {
                    fs::create_dir(&path).unwrap();
                    fs::write(path.join("manifest.json"), b"{ damaged").unwrap();
                    fs::write(path.join("rank-0.safetensors"), b"x").unwrap();
                }
                6 => {
                    fs::create_dir(&path).unwrap();
                    fs::create_dir(path.join("manifest.json")).unwrap();
                }
                7 => {
                    fs::create_dir(&path).unwrap();
                    symlink("/dev/zero", path.join("manifest.json")).unwrap();
                }
                8 => {
                    fs::create_dir(&path).unwrap();
                    fs::write(path.join("everstep-mark.json"), b"not a mark").unwrap();
                }
                _ => {
                    // As DCP leaves it.
                    fs::create_dir(&path).unwrap();
                    fs::write(path.join(".metadata"), b"pickle").unwrap();
                    fs::write(path.join("__0_0.distcp"), vec![kind as u8; 40]).unwrap();
                }
            }
            self.protect(&path);
        }
    }

    fn protect(&mut self, path: &Path) {
        self.protected.insert(path.to_owned(), hash(path));
    }

    /// Runs with one call failing, sometimes.
    fn failing<T>(&mut self, random: &mut Random, of: impl FnOnce(&mut Self) -> T) -> T {
        let fails = random.below(3) == 0;
        if fails {
            let errno = [EIO, ENOSPC, ESTALE][random.below(3) as usize];
            faults::plan(random.below(60), errno, random.below(3) == 0);
        }
        let done = of(self);
        if fails {
            faults::end();
            self.faults += 1;
        }
        done
    }

    /// A step that is written and published; true when it is claimed to be durable.
    fn publish(&mut self, random: &mut Random, purpose: Purpose, mark: Mark) -> Option<PathBuf> {
        let (step, branch) = (self.step, self.branch);
        captured(&self.slot, step, purpose, branch);
        let done = self.failing(random, |w| {
            let shard = persist::write_shard(&w.slot, &w.out, &mark, step, Rank(0), &Throttle::new(0))?;
            persist::publish(&w.out, &mark, step, &[shard], Target::Branch)
        });
        if let Err(e) = &done {
            trace(|| format!("  step {step} {purpose:?}: {e}"));
            self.unclaimed.insert(step);
        }
        done.ok()
    }

    fn advance(&mut self, random: &mut Random) {
        self.step += 1;
        if let Some(path) = self.publish(random, Purpose::Recovery, self.mark) {
            let step = self.step;
            self.claimed.push(step);
            if self.protected.contains_key(&path) {
                self.found.push(format!("step {step} was published over {}", path.display()));
            }
            let policy = Policy { last: KEEP, every: None, epochs: true, abandoned: false };
            let mark = self.mark;
            let done = self.failing(random, |w| persist::prune(&w.out, policy, &mark));
            trace(|| format!("  pruned {done:?}"));
        }
    }

    fn save(&mut self, random: &mut Random) {
        if self.step == 0 {
            return;
        }
        // Saving a step again in one generation replaces the user's own.
        let again = self.saved.iter().find(|(_, of)| **of == (self.step, self.mark.generation, self.branch));
        let again = again.map(|(path, _)| path.clone());
        self.protected.retain(|path, _| Some(path) != again.as_ref());
        let published = self.publish(random, Purpose::User, self.mark);
        if let Some(path) = published.clone() {
            if self.claimed.last() != Some(&self.step) {
                self.claimed.push(self.step);
            }
            self.saved.insert(path, (self.step, self.mark.generation, self.branch));
        }
        for path in again.into_iter().chain(published) {
            if persist::read_manifest(&path).is_err() {
                self.found.push(format!("{} was the user's and is gone", path.display()));
            }
            self.protect(&path);
        }
    }

    /// A new life: what is continued must be what ran last. Sometimes the user goes back.
    fn restart(&mut self, random: &mut Random, to: Option<u64>) {
        self.mark.generation += 1;
        let line = persist::line(&self.out).unwrap();
        let readable = |p: &Path, m: &everstep_checkpoint::format::manifest::Manifest| {
            m.shards.iter().all(|s| Shard::from_file(p, s).is_ok_and(|s| s.verify(1).is_ok()))
        };
        let mut good = line.iter().filter_map(|(s, p, m)| Some((*s, p, m.as_ref().ok().filter(|m| readable(p, m))?)));
        let from = match to {
            None => good.next(),
            Some(step) => good.find(|(s, ..)| *s == step),
        };
        if let (Some(expected), None) = (self.claimed.last(), to)
            // One whose last call failed may be there all the same, and newer.
            && from.as_ref().is_none_or(|(s, ..)| s != expected && !(s > expected && self.unclaimed.contains(s)))
        {
            let got = from.as_ref().map(|(s, ..)| *s);
            self.found.push(format!("step {expected} was to be continued, and {got:?} was"));
        }
        let Some((step, path, manifest)) = from else { return };
        let (asked, run) = (to.is_some(), self.mark.run);
        let (path, manifest, mark) = (path.clone(), manifest.clone(), self.mark);
        let beyond = line.iter().filter(|(s, _, m)| *s > step && m.is_ok()).map(|(_, p, _)| p.clone());
        let beyond: Vec<PathBuf> = beyond.collect();
        let before = persist::recorded(&self.out, Some(run)).unwrap().map(|r| r.lineage);
        let begun = match self.failing(random, |w| persist::begin(&w.out, Origin::Durable(&manifest), asked, &mark)) {
            Ok(lineage) => Some(lineage),
            // The script ends at its first step. The next life goes on from where this one has
            // begun, if that is recorded.
            Err(_) => persist::recorded(&self.out, Some(run))
                .unwrap()
                .map(|r| r.lineage)
                .filter(|l| Some(l) != before.as_ref()),
        };
        trace(|| format!("  from {step}, asked {asked}: {begun:?}"));
        let Some(lineage) = begun else { return };
        if asked && !beyond.is_empty() {
            // What the user left stays, with the step that it was left at.
            self.abandoned.extend(beyond.into_iter().chain([path]));
        }
        self.branch = lineage.branch;
        self.claimed.retain(|s| *s <= step);
        self.unclaimed.retain(|s| *s <= step);
        self.step = step;
    }

    /// The newest two claimed steps of the running branch are there, all protected entries are as
    /// they were.
    fn check(&mut self) {
        for (path, was) in &self.protected {
            if hash(path) != *was {
                self.found.push(format!("{} was changed", path.display()));
            }
        }
        for path in self.abandoned.iter().filter(|p| !p.exists()) {
            self.found.push(format!("{} was left by the user and is gone", path.display()));
        }
        let line: BTreeSet<u64> = match persist::line(&self.out) {
            Ok(line) => line.into_iter().filter(|(_, _, m)| m.is_ok()).map(|(s, ..)| s).collect(),
            Err(e) => return self.found.push(format!("cannot list: {e}")),
        };
        for step in self.claimed.iter().filter(|s| !line.contains(s) && line.range(*s..).count() < KEEP) {
            self.found.push(format!("durable step {step} is missing"));
        }
        // What retention let go while there were newer ones.
        self.claimed.retain(|s| line.contains(s));
        self.check_copy(&line);
    }

    /// A copy of the directory continues what the directory would.
    fn check_copy(&mut self, line: &BTreeSet<u64>) {
        let copy = self.out.with_file_name("copy");
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir(&copy).unwrap();
        let whole = |path: &Path| path.is_dir() && !path.is_symlink();
        for entry in fs::read_dir(&self.out).unwrap().flatten() {
            let (path, to) = (entry.path(), copy.join(entry.file_name()));
            if path.is_file() {
                fs::copy(&path, &to).unwrap();
            } else if whole(&path) {
                fs::create_dir(&to).unwrap();
                for file in fs::read_dir(&path).unwrap().flatten().filter(|f| f.path().is_file()) {
                    fs::copy(file.path(), to.join(file.file_name())).unwrap();
                }
            }
        }
        if persist::run_id(&copy).unwrap() == self.mark.run {
            self.found.push("a copy has the run id of its original".into());
        }
        let there = persist::line(&copy).unwrap();
        let there: BTreeSet<u64> = there.into_iter().filter(|(_, _, m)| m.is_ok()).map(|(s, ..)| s).collect();
        if there.last() != line.last() {
            self.found.push(format!("a copy continues {:?} instead of {:?}", there.last(), line.last()));
        }
    }
}

/// What retention did before: whatever has the name and no manifest is half a deletion.
fn old_rule(out: &Path) {
    for entry in fs::read_dir(out).unwrap().flatten() {
        let name = entry.file_name();
        let named = name.to_str().and_then(|n| n.strip_prefix("step-")).is_some_and(|n| n.parse::<u64>().is_ok());
        if named && !entry.path().join("manifest.json").exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sequence(scratch: &Path, slot: &Arc<Slot>, random: &mut Random, planted: bool) -> World {
    let out = scratch.join("out");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir(&out).unwrap();
    let run = persist::run_id(&out).unwrap();
    let mark = Mark { run, epoch: 1, generation: 1, attempt: 0 };
    let mut world = World {
        out,
        slot: slot.clone(),
        protected: BTreeMap::new(),
        mark,
        step: 0,
        claimed: Vec::new(),
        unclaimed: BTreeSet::new(),
        abandoned: BTreeSet::new(),
        saved: BTreeMap::new(),
        branch: 0,
        faults: 0,
        found: Vec::new(),
    };
    world.foreign(random);
    world.branch = persist::begin(&world.out, Origin::Scratch, false, &mark).unwrap().branch;
    for _ in 0..4 + random.below(10) {
        let what = random.below(12);
        trace(|| format!("{what} at {} claimed {:?} {:?}", world.step, world.claimed, names(&world.out)));
        match what {
            0..6 => world.advance(random),
            6 => world.save(random),
            7 => world.restart(random, None),
            8 => {
                let back = random.below(world.claimed.len() as u64 + 1) as usize;
                let to = world.claimed.get(back).copied();
                world.restart(random, to);
            }
            9 => {
                // Somebody cleans up from outside.
                let policy = Policy { last: 0, every: None, epochs: false, abandoned: false };
                let _ = world.failing(random, |w| persist::prune_outside(&w.out, policy, false));
            }
            10 => {
                // A second job of the run, one that wakes up late: it deletes by its own, older
                // mark.
                let late = Mark { generation: world.mark.generation.saturating_sub(1), ..world.mark };
                let policy = Policy { last: KEEP, every: None, epochs: true, abandoned: false };
                let _ = world.failing(random, |w| persist::prune(&w.out, policy, &late));
            }
            _ => {
                // The other job's own writing, half done.
                captured(&world.slot, world.step + 1, Purpose::Recovery, 0);
                let other = Mark { run: everstep_core::id::RunId(7), ..world.mark };
                let path = world.out.join(format!("step-{}.tmp-1.{}", world.step + 1, other.generation + 50));
                if !path.exists() {
                    fs::create_dir(&path).unwrap();
                    fs::write(path.join("everstep-mark.json"), serde_json::to_vec(&other).unwrap()).unwrap();
                    fs::write(path.join("rank-0.safetensors"), b"half").unwrap();
                    world.protect(&path);
                }
            }
        }
        if planted {
            old_rule(&world.out);
        }
        world.check();
        if !world.found.is_empty() {
            break;
        }
    }
    world
}

/// One sequence at a time can be looked at.
fn trace(what: impl FnOnce() -> String) {
    if std::env::var_os("TRACE").is_some() {
        eprintln!("{}", what());
    }
}

fn names(out: &Path) -> Vec<String> {
    let mut all: Vec<String> =
        fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |i: usize| arguments.get(i).and_then(|a| a.parse::<u64>().ok()).unwrap_or(0);
    let planted = arguments.get(3).is_some_and(|a| a == "planted");
    let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
    let slot = Arc::new(Slot::reserve(&scratch.path().join("slot"), slot_bytes(64 << 10, 64 << 10)).unwrap());
    fs::create_dir(scratch.path().join("elsewhere")).unwrap();
    let other = scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    let mark = Mark { run: persist::run_id(&other).unwrap(), epoch: 1, generation: 1, attempt: 0 };
    captured(&slot, 1, Purpose::Recovery, 0);
    let shard = persist::write_shard(&slot, &other, &mark, 1, Rank(0), &Throttle::new(0)).unwrap();
    persist::publish(&other, &mark, 1, &[shard], Target::Branch).unwrap();
    let (mut faults, mut protected, mut bad, mut examples) = (0, 0, 0, Vec::new());
    let only = std::env::var("TRACE").ok().and_then(|t| t.parse::<u64>().ok());
    for n in (0..number(1)).filter(|n| only.is_none_or(|o| o == *n)) {
        let mut random = Random(number(2).wrapping_mul(1_000_003).wrapping_add(n));
        let world = sequence(scratch.path(), &slot, &mut random, planted);
        faults += world.faults;
        protected += world.protected.len();
        if !world.found.is_empty() {
            bad += 1;
            if examples.len() < 5 {
                examples.push(format!("sequence {n}: {}", world.found.join("; ")));
            }
        }
    }
    let found = serde_json::json!({
        "sequences": number(1), "seed": number(2), "faults": faults, "protected": protected, "bad": bad, "examples": examples,
    });
    println!("{found}");
    // The control is expected to lose something.
    std::process::exit(i32::from(bad > 0 && !planted));
}

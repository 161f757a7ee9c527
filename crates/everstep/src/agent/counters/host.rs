//! CPU, memory and disk usage: of the agent's own control group if it has one (in a container, or
//! in a scheduler's job), otherwise of the machine.
//!
//! Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/, proc(5).

use super::table::read;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where a number is read.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Version 2: one directory.
    Unified(PathBuf),
    /// Version 1: a directory for each controller.
    Each(PathBuf),
    /// No control group but the root.
    Machine,
}

/// Where to read the CPU, memory and disk usage.
#[derive(Clone, Debug)]
pub struct Host {
    cpu: Place,
    memory: Place,
    disk: Place,
}

/// Returns the directories of this process's groups by controller; the unified one is named "".
fn groups(text: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        for controller in controllers.split(',') {
            all.insert(controller.to_owned(), path.to_owned());
        }
    }
    all
}

impl Host {
    /// Finds the control groups of this process.
    #[must_use]
    pub fn open() -> Host {
        let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        // A process with its own /sys (`ip netns exec` mounts one) cannot see its own groups there,
        // but one of its ancestors may.
        let above = ancestors().map(|pid| PathBuf::from(format!("/proc/{pid}/root/sys/fs/cgroup")));
        let roots = std::iter::once(PathBuf::from("/sys/fs/cgroup")).chain(above);
        let grouped = roots.map(|root| Host::at(&root, &text)).find(|h| h.cpu != Place::Machine);
        grouped.unwrap_or_else(|| Host::at(Path::new("/sys/fs/cgroup"), &text))
    }

    fn at(root: &Path, text: &str) -> Host {
        let all = groups(text);
        let place = |controller: &str, file_2: &str, file_1: &str| {
            let within = |path: &String| path.trim_start_matches('/').to_owned();
            let one = all.get(controller).filter(|p| *p != "/").map(|p| root.join(controller).join(within(p)));
            let two = all.get("").filter(|p| *p != "/").map(|p| root.join(within(p)));
            match (one, two) {
                (Some(one), _) if one.join(file_1).exists() => Place::Each(one),
                (_, Some(two)) if two.join(file_2).exists() => Place::Unified(two),
                _ => Place::Machine,
            }
        };
        Host {
            cpu: place("cpuacct", "cpu.stat", "cpuacct.usage"),
            memory: place("memory", "memory.current", "memory.stat"),
            disk: place("blkio", "io.stat", "blkio.throttle.io_service_bytes"),
        }
    }

    /// Returns the CPU time so far, in microseconds.
    pub fn cpu_us(&self) -> Option<u64> {
        match &self.cpu {
            Place::Unified(at) => field(&read(at.join("cpu.stat"))?, "usage_usec"),
            Place::Each(at) => Some(read(at.join("cpuacct.usage"))?.trim().parse::<u64>().ok()? / 1000),
            Place::Machine => {
                let text = read(Path::new("/proc/stat"))?;
                let numbers: Vec<u64> =
                    text.lines().next()?.split_whitespace().skip(1).map_while(|n| n.parse().ok()).collect();
                // user nice system idle iowait irq softirq steal; `user` includes the time of
                // guests.
                let busy: u64 = [0, 1, 2, 5, 6].into_iter().filter_map(|n| numbers.get(n)).sum();
                Some(busy * 1_000_000 / rustix::param::clock_ticks_per_second().max(1))
            }
        }
    }

    /// Returns the bytes in use, without those that the kernel could reclaim.
    pub fn memory(&self) -> Option<u64> {
        match &self.memory {
            Place::Unified(at) => {
                let stat = read(at.join("memory.stat"))?;
                Some(["anon", "shmem", "kernel_stack", "sock"].into_iter().filter_map(|name| field(&stat, name)).sum())
            }
            Place::Each(at) => {
                let stat = read(at.join("memory.stat"))?;
                Some(["total_rss", "total_shmem"].into_iter().filter_map(|name| field(&stat, name)).sum())
            }
            Place::Machine => {
                let text = read(Path::new("/proc/meminfo"))?;
                let kib = |name: &str| field(&text, name);
                Some((kib("MemTotal")? - kib("MemAvailable")?) * 1024)
            }
        }
    }

    /// Returns the bytes read and written so far.
    pub fn disk(&self) -> Option<u64> {
        match &self.disk {
            Place::Unified(at) => {
                let text = read(at.join("io.stat"))?;
                let of =
                    |word: &str| word.strip_prefix("rbytes=").or(word.strip_prefix("wbytes="))?.parse::<u64>().ok();
                Some(text.split_whitespace().filter_map(of).sum())
            }
            Place::Each(at) => {
                let text = read(at.join("blkio.throttle.io_service_bytes"))?;
                let of = |line: &str| {
                    let mut words = line.split_whitespace().skip(1);
                    let kind = words.next()?;
                    (kind == "Read" || kind == "Write").then(|| words.next()?.parse::<u64>().ok())?
                };
                let counted: u64 = text.lines().filter_map(of).sum();
                // Not every kernel counts for groups of version 1. Where it does not, count
                // processes.
                if counted > 0 { Some(counted) } else { of_processes(at) }
            }
            Place::Machine => {
                let text = read(Path::new("/proc/diskstats"))?;
                let of = |line: &str| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    let name = words.get(2)?;
                    // Only whole disks: traffic of the kernel's virtual devices ends up there, too.
                    let whole = Path::new("/sys/block").join(name).join("device").exists();
                    let sectors = |n: usize| words.get(n)?.parse::<u64>().ok();
                    whole.then(|| Some((sectors(5)? + sectors(9)?) * 512))?
                };
                Some(text.lines().filter_map(of).sum())
            }
        }
    }
}

/// Returns the bytes that the processes of a group have read and written, including children that
/// have exited.
fn of_processes(group: &Path) -> Option<u64> {
    let pids = read(group.join("cgroup.procs"))?;
    let of = |pid: &str| {
        let io = read(Path::new("/proc").join(pid).join("io"))?;
        Some(field(&io, "read_bytes")? + field(&io, "write_bytes")?)
    };
    Some(pids.lines().filter_map(of).sum())
}

/// Returns the parent of this process, its parent, and so on.
fn ancestors() -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok().filter(|p| *p > 0)
    };
    std::iter::successors(parent(&std::process::id()), parent)
}

/// Returns a value from a table of `NAME VALUE` or `NAME: VALUE` lines.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next()?.trim_end_matches(':') == name).then(|| words.next()?.parse().ok())?
    };
    text.lines().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_are_found_and_read() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str, text: &str| {
            let at = root.path().join(path);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(at, text).unwrap();
        };
        make("a/b/cpu.stat", "usage_usec 77\nuser_usec 70\n");
        make("a/b/memory.current", "1\n");
        make("a/b/memory.stat", "anon 100\nfile 900\nshmem 5\n");
        make("a/b/io.stat", "8:0 rbytes=10 wbytes=20 rios=1\n8:16 rbytes=1 wbytes=2\n");
        let two = Host::at(root.path(), "0::/a/b\n");
        assert_eq!((two.cpu_us(), two.memory(), two.disk()), (Some(77), Some(105), Some(33)));
        make("cpuacct/j/cpuacct.usage", "5000\n");
        make("memory/j/memory.stat", "rss 1\ntotal_rss 40\ntotal_shmem 2\n");
        make("blkio/j/blkio.throttle.io_service_bytes", "8:0 Read 3\n8:0 Write 4\n8:0 Total 7\nTotal 7\n");
        make("blkio/k/cgroup.procs", &format!("{}\n", std::process::id()));
        make("blkio/k/blkio.throttle.io_service_bytes", "Total 0\n");
        assert!(Host::at(root.path(), "2:blkio:/k\n").disk().is_some());
        let one = Host::at(root.path(), "4:memory:/j\n3:cpu,cpuacct:/j\n2:blkio:/j\n0::/\n");
        assert_eq!((one.cpu_us(), one.memory(), one.disk()), (Some(5), Some(42), Some(7)));
        let machine = Host::at(root.path(), "0::/\n");
        assert_eq!(machine.cpu, Place::Machine);
        assert!(machine.cpu_us().unwrap() > 0 && machine.memory().unwrap() > 0 && machine.disk().is_some());
    }
}

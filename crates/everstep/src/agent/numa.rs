//! `--numa-binding`: finds the processors near a worker's accelerator (`torch/numa/binding.py`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Parses a list in sysfs format: `0-3,8`.
fn list(text: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        Some(a.trim().parse::<u32>().ok()?..=b.trim().parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

fn read(path: PathBuf) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|t| t.trim().to_owned())
}

/// Returns the NUMA nodes of the accelerators, in the order of their bus addresses.
fn devices(root: &Path) -> Vec<u32> {
    let mut addresses: Vec<String> = std::fs::read_dir(root.join("proc/driver/nvidia/gpus"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    addresses.sort();
    let node = |a: &String| read(root.join("sys/bus/pci/devices").join(a).join("numa_node"))?.parse::<i64>().ok();
    // -1 means that the machine does not report the node: assume that it has one.
    addresses.iter().map(|a| u32::try_from(node(a).unwrap_or(0)).unwrap_or(0)).collect()
}

fn cpus_of_node(root: &Path, node: u32) -> BTreeSet<u32> {
    read(root.join(format!("sys/devices/system/node/node{node}/cpulist"))).map_or_else(BTreeSet::new, |t| list(&t))
}

fn cpu_file(root: &Path, cpu: u32, file: &str) -> Option<String> {
    read(root.join(format!("sys/devices/system/cpu/cpu{cpu}")).join(file))
}

fn package(root: &Path, cpu: u32) -> Option<String> {
    cpu_file(root, cpu, "topology/physical_package_id")
}

/// Groups processors that share `key`, ordered by their lowest number.
fn groups(cpus: &BTreeSet<u32>, key: impl Fn(u32) -> Option<String>) -> Vec<BTreeSet<u32>> {
    let mut found: Vec<(Option<String>, BTreeSet<u32>)> = Vec::new();
    for cpu in cpus {
        let k = key(*cpu);
        match found.iter_mut().find(|(name, _)| *name == k) {
            Some((_, group)) => drop(group.insert(*cpu)),
            None => found.push((k, BTreeSet::from([*cpu]))),
        }
    }
    found.into_iter().map(|(_, g)| g).collect()
}

/// Why a worker cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    #[error(
        "--numa-binding binds workers to the processors near their accelerators, and this machine has {has}; drop the option"
    )]
    NoAccelerator { has: usize },
    #[error("--numa-binding exclusive: {accelerators} accelerators share {cores} cores; use node")]
    TooFewCores { accelerators: usize, cores: usize },
    #[error("--numa-binding {mode}: the machine names no processors near accelerator {accelerator}; drop the option")]
    NoProcessors { mode: String, accelerator: u32 },
}

/// Returns the processors that worker `local` may use.
///
/// # Errors
/// [`BindingError`].
pub fn cpus(root: &Path, mode: &str, local: u32) -> Result<Vec<u32>, BindingError> {
    let devices = devices(root);
    let Some(node) = devices.get(local as usize).copied() else {
        return Err(BindingError::NoAccelerator { has: devices.len() });
    };
    let near = cpus_of_node(root, node);
    let siblings: Vec<u32> = (0..).zip(&devices).filter(|(_, n)| **n == node).map(|(i, _)| i).collect();
    let index = siblings.iter().position(|d| *d == local).unwrap_or(0);
    let chosen: BTreeSet<u32> = match mode {
        "node" => near,
        "socket" => {
            let own = near.first().and_then(|c| package(root, *c));
            let nodes = list(&read(root.join("sys/devices/system/node/online")).unwrap_or_default());
            let same = |n: &u32| cpus_of_node(root, *n).first().is_some_and(|c| package(root, *c) == own);
            nodes.into_iter().filter(same).flat_map(|n| cpus_of_node(root, n)).collect()
        }
        "exclusive" => {
            let cores = groups(&near, |c| cpu_file(root, c, "topology/thread_siblings_list"));
            let (each, more) = (cores.len() / siblings.len().max(1), cores.len() % siblings.len().max(1));
            if each == 0 {
                return Err(BindingError::TooFewCores { accelerators: siblings.len(), cores: cores.len() });
            }
            let first = index * each + index.min(more);
            cores.into_iter().skip(first).take(each + usize::from(index < more)).flatten().collect()
        }
        _ => {
            let mut complexes = groups(&near, |c| cpu_file(root, c, "cache/index3/shared_cpu_list"));
            // Largest first, so that a complex with disabled cores comes last.
            complexes.sort_by_key(|g| (std::cmp::Reverse(g.len()), g.first().copied()));
            let n = complexes.len().max(1);
            complexes.into_iter().nth(index % n).unwrap_or_default()
        }
    };
    if chosen.is_empty() {
        return Err(BindingError::NoProcessors { mode: mode.into(), accelerator: local });
    }
    Ok(chosen.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of four cores with two threads each; devices 0 to 3, two per socket.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let put = |path: String, text: String| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("sys/devices/system/node/online".into(), "0-1\n".into());
        for node in 0..2u32 {
            put(
                format!("sys/devices/system/node/node{node}/cpulist"),
                format!("{}-{},{}-{}\n", node * 4, node * 4 + 3, node * 4 + 8, node * 4 + 11),
            );
        }
        for cpu in 0..16u32 {
            let base = format!("sys/devices/system/cpu/cpu{cpu}");
            put(format!("{base}/topology/physical_package_id"), format!("{}\n", cpu % 8 / 4));
            put(format!("{base}/topology/thread_siblings_list"), format!("{},{}\n", cpu % 8, cpu % 8 + 8));
            put(format!("{base}/cache/index3/shared_cpu_list"), format!("group{}\n", cpu % 8 / 2));
        }
        for device in 0..4u32 {
            let address = format!("0000:0{device}:00.0");
            std::fs::create_dir_all(root.path().join("proc/driver/nvidia/gpus").join(&address)).unwrap();
            put(format!("sys/bus/pci/devices/{address}/numa_node"), format!("{}\n", device / 2));
        }
        root
    }

    #[test]
    fn workers_are_bound_near_their_devices() {
        let root = machine();
        let of = |mode: &str, local| cpus(root.path(), mode, local).unwrap();
        assert_eq!(of("node", 3), [4, 5, 6, 7, 12, 13, 14, 15]);
        assert_eq!(of("socket", 0), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(of("exclusive", 0), [0, 1, 8, 9]);
        assert_eq!(of("exclusive", 1), [2, 3, 10, 11]);
        assert_eq!(of("core-complex", 2), [4, 5, 12, 13]);
        assert_eq!(of("core-complex", 3), [6, 7, 14, 15]);
    }

    #[test]
    fn a_machine_without_accelerators_is_named() {
        assert!(cpus(Path::new("/nonexistent"), "node", 0).unwrap_err().to_string().contains("has 0"));
    }
}

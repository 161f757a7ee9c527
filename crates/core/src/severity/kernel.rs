//! Messages about devices in the kernel log: numbered errors of NVIDIA's drivers, and the devices
//! they concern.

use super::table::{Class, Scope, Table, Xid};
use super::verdict::Verdict;
use crate::failure::Sign;

/// Class of a number without a row in the table.
const NOTICE: &str = "gpu-notice";

/// A numbered error of a GPU's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered<'s> {
    /// The number of an `Xid`, or of a switch's `SXid` if `switch` is set.
    pub code: u32,
    /// PCI address, as in `0000:3b:00`.
    pub device: &'s str,
    /// Whether an NVSwitch reported the error, not a GPU.
    pub switch: bool,
    /// Whether a switch reported the error as fatal.
    pub fatal: bool,
}

/// Parses `NVRM: Xid (PCI:0000:3b:00): 79, pid=…` and
/// `nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, …`.
#[must_use]
pub fn numbered(line: &str) -> Option<Numbered<'_>> {
    let (before, rest) = line.split_once("Xid (")?;
    let (device, rest) = rest.split_once("):")?;
    let digits = rest.trim_start();
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let code = digits.get(..end)?.parse().ok()?;
    let switch = before.ends_with('S');
    let fatal = switch && rest.contains("Fatal") && !rest.contains("Non-fatal");
    Some(Numbered { code, device: device.trim_start_matches("PCI:"), switch, fatal })
}

/// Extracts the process that a line is about: `Killed process 1234 (python)`, `pid=1234`,
/// `python[1234]: segfault at …`.
fn process(line: &str) -> Option<u32> {
    let after = |sign: &str| line.split_once(sign).map(|(_, rest)| rest.trim_start());
    let within = || Some(line.split_once("]: segfault")?.0.rsplit_once('[')?.1);
    let digits = after("Killed process ").or_else(|| after("pid=")).or_else(within)?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits.get(..end)?.parse().ok()
}

impl Table {
    /// Returns the sign in a line of the kernel log about the machine or a process on it, or `None`
    /// if the line shows no failure.
    #[must_use]
    pub fn sign(&self, line: &str) -> Option<Sign> {
        let seen = numbered(line);
        let class = match &seen {
            Some(seen) => self.of_number(seen)?.0,
            None => self.classify(line)?.class,
        };
        let pid = process(line);
        let of_machine = matches!(class.scope, Scope::Node | Scope::Fabric | Scope::Storage);
        let of_process = class.scope == Scope::Process && pid.is_some();
        if seen.is_none() && (class.follows || !(of_machine || of_process)) {
            return None;
        }
        let device = seen.map_or(String::new(), |s| s.device.to_owned());
        Some(Sign { verdict: Verdict::of(class, line), pid, device })
    }

    /// Returns the class of a numbered error, and the action that the vendor recommends.
    #[must_use]
    pub fn of_number(&self, seen: &Numbered<'_>) -> Option<(&Class, &str)> {
        if seen.switch {
            let name = if seen.fatal { "nvlink" } else { NOTICE };
            return Some((self.class(name)?, if seen.fatal { "reset the GPUs and switches" } else { "none" }));
        }
        let row = self.xids.iter().find(|x| x.codes.has(seen.code));
        let (name, action) = row.map_or((NOTICE, "ask the vendor"), |x: &Xid| (&x.class, &x.action));
        Some((self.class(name)?, action))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_and_a_switch_are_told_apart() {
        let gpu = numbered("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.");
        assert_eq!(gpu, Some(Numbered { code: 79, device: "0000:3b:00", switch: false, fatal: false }));
        let switch = numbered("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress");
        assert_eq!(switch, Some(Numbered { code: 12028, device: "0000:c1:00.0", switch: true, fatal: false }));
        assert!(
            numbered("nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link 30 LTSSM Fault Up").unwrap().fatal
        );
        assert_eq!(numbered("NVRM: loading NVIDIA UNIX x86_64 Kernel Module"), None);
    }

    #[test]
    fn a_line_says_what_it_is_about() {
        let sign = |line: &str| Table::built_in().sign(line).map(|s| (s.verdict.class, s.pid, s.device));
        let oom = "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB";
        assert_eq!(sign(oom), Some(("host-memory".into(), Some(4242), String::new())));
        let memcg = "Memory cgroup out of memory: Killed process 77 (python3) total-vm:9kB";
        assert_eq!(sign(memcg), Some(("host-memory".into(), Some(77), String::new())));
        let xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.";
        assert_eq!(sign(xid), Some(("gpu-lost".into(), Some(1234), "0000:3b:00".into())));
        let crash = "python[991]: segfault at 0 ip 00007f error 4 in libfoo.so";
        assert_eq!(sign(crash), Some(("crashed".into(), Some(991), String::new())));
        assert_eq!(sign("mce: [Hardware Error]: Machine check events logged").unwrap().0, "machine-check");
        for quiet in
            ["usb 1-1: new high-speed USB device number 2", "eth0: renamed from veth1a2b", "audit: type=1400 error=0"]
        {
            assert_eq!(sign(quiet), None, "{quiet}");
        }
    }

    #[test]
    fn every_number_has_a_class() {
        let table = Table::built_in();
        for code in 1..=200 {
            let (class, action) = table.of_number(&Numbered { code, device: "", switch: false, fatal: false }).unwrap();
            assert!(!class.name.is_empty() && !action.is_empty());
        }
        let rows = |code| table.xids.iter().filter(|x| x.codes.has(code)).count();
        assert!((1..=173).all(|code| rows(code) == 1), "{:?}", (1..=173).filter(|c| rows(*c) != 1).collect::<Vec<_>>());
        let class = |code| {
            table.of_number(&Numbered { code, device: "", switch: false, fatal: false }).unwrap().0.name.as_str()
        };
        // A contained error ends a program; an uncontained one disables the machine.
        assert_eq!(
            (class(94), class(95), class(79), class(48), class(13)),
            ("gpu-program", "gpu-memory", "gpu-lost", "gpu-memory", "gpu-program")
        );
    }
}

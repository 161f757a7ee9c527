//! What the kernel's log says of devices: numbered errors of NVIDIA's drivers, and which device they are about.

use super::table::{Class, Table, Xid};

/// Class of a number that no row has.
const NOTICE: &str = "gpu-notice";

/// A numbered error of a GPU's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered<'s> {
    /// `Xid`'s number; of a switch's `SXid` when `switch`.
    pub code: u32,
    /// PCI address, as in `0000:3b:00`.
    pub device: &'s str,
    /// An NVSwitch says so, not a GPU.
    pub switch: bool,
    /// Of a switch: it says itself that this is fatal.
    pub fatal: bool,
}

/// Reads `NVRM: Xid (PCI:0000:3b:00): 79, pid=…` and `nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, …`.
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

impl Table {
    /// The class of a numbered error, and what the vendor recommends.
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
        // A contained error ends a program, an uncontained one takes the machine out.
        assert_eq!(
            (class(94), class(95), class(79), class(48), class(13)),
            ("gpu-program", "gpu-memory", "gpu-lost", "gpu-memory", "gpu-program")
        );
    }
}

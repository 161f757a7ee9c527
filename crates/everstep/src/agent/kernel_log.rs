//! The kernel's log: GPU errors, out-of-memory kills, machine checks, links. Read from the kernel's
//! device or from a file.

use super::Input;
use everstep_core::agent::event::Event;
use everstep_core::severity::Table;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The kernel's log device.
pub const DEVICE: &str = "/dev/kmsg";
/// Longest record of the device (CONSOLE_EXT_LOG_MAX).
const RECORD: usize = 8192;
/// How often a file is checked for new lines.
const LOOK: Duration = Duration::from_millis(50);

/// Returns the text of a device record such as `6,1234,5678901,-;NVRM: Xid …`, without its
/// continuation lines. Returns `None` if the kernel did not write it: any process may write to the
/// device.
fn record(record: &str) -> Option<&str> {
    let (head, text) = record.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    (priority >> 3 == 0).then(|| text.lines().next().unwrap_or_default())
}

/// Returns the text of a line of a file, which may look like the device's records, like `dmesg`'s
/// output, or be bare.
fn line(text: &str) -> &str {
    if let Some((head, rest)) = text.split_once(';')
        && head.split(',').next().is_some_and(|p| p.parse::<u32>().is_ok())
    {
        return rest;
    }
    let bare = text.trim_start();
    match bare.strip_prefix('[').and_then(|r| r.split_once("] ")) {
        Some((stamp, rest)) if stamp.trim().parse::<f64>().is_ok() => rest,
        _ => bare,
    }
}

/// Follows the log at `path` for the life of the agent. Ends silently if it cannot be read.
pub fn follow(path: PathBuf, table: Arc<Table>, inbox: mpsc::UnboundedSender<Input>) {
    let say = move |text: &str| match table.sign(text) {
        Some(sign) => inbox.send(Input::Core(Event::Signed(sign))).is_ok(),
        None => !inbox.is_closed(),
    };
    let follow = move || {
        let device = std::fs::metadata(&path).is_ok_and(|m| m.file_type().is_char_device());
        if device { of_device(&path, say) } else { of_file(&path, say) }
    };
    let _ = std::thread::Builder::new().name("everstep-kernel".into()).spawn(follow);
}

fn of_device(path: &Path, say: impl Fn(&str) -> bool) {
    let Ok(mut log) = File::open(path) else { return };
    let _ = log.seek(SeekFrom::End(0));
    let mut buffer = [0; RECORD];
    loop {
        match log.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                let text = String::from_utf8_lossy(buffer.get(..n).unwrap_or_default());
                if !record(&text).is_none_or(&say) {
                    return;
                }
            }
            // EPIPE: records were overwritten before they were read.
            Err(e) if e.raw_os_error() == Some(32) || e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Follows a file from its end, or from its beginning if it is created later.
fn of_file(path: &Path, say: impl Fn(&str) -> bool) {
    let mut fresh = false;
    let file = loop {
        match File::open(path) {
            Ok(file) => break file,
            Err(_) => (fresh, ()) = (true, std::thread::sleep(LOOK)),
        }
    };
    let mut log = BufReader::new(file);
    if !fresh {
        let _ = log.seek(SeekFrom::End(0));
    }
    let mut text = String::new();
    loop {
        match log.read_line(&mut text) {
            Ok(n) if n > 0 && text.ends_with('\n') => {
                if !say(line(text.trim_end())) {
                    return;
                }
                text.clear();
            }
            Ok(_) => std::thread::sleep(LOOK),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_is_believed() {
        let xid = "3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79\n SUBSYSTEM=pci\n";
        assert_eq!(record(xid), Some("NVRM: Xid (PCI:0000:3b:00): 79"));
        assert_eq!(record("11,428,17,-;NVRM: Xid (PCI:0000:3b:00): 79"), None);
        assert_eq!(record("nonsense"), None);
    }

    #[test]
    fn a_file_may_be_written_in_three_ways() {
        assert_eq!(line("6,1,2,-;eth0: Link down"), "eth0: Link down");
        assert_eq!(line("[ 1234.567890] eth0: Link down"), "eth0: Link down");
        assert_eq!(line("[Hardware Error]: x; y"), "[Hardware Error]: x; y");
    }
}

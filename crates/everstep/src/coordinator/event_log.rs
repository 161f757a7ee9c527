//! The event log. Lines that cannot be written, as on a full disk, are kept in memory until they
//! can, and users are notified. They are also notified if the file is removed.

use super::Driver;
use everstep_core::coordinator::command::Fact;
use everstep_core::history::LogLine;
use everstep_core::id::{JobId, Session};
use everstep_core::message::Order;
use everstep_wire::limits::EVENTS_KEPT_BYTES_MAX;
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often to look whether the file is still at its path, which may be on a slow file system.
const LOOK: Duration = Duration::from_secs(1);

fn identity(about: &Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}

/// A file of lines, in order, each written whole.
pub struct EventLog {
    file: File,
    path: PathBuf,
    /// Lines that could not be written yet.
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Number of lines dropped for lack of room in memory.
    dropped: u64,
    /// Users were notified that lines are waiting.
    late: bool,
    /// A notice for users, until it is taken.
    news: Option<String>,
    /// The file's device and inode.
    identity: (u64, u64),
    /// Users were notified that the file was removed.
    removed: bool,
    /// When the file was last looked for.
    looked: Instant,
}

impl EventLog {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = crate::events_file::open(path)?;
        Ok(EventLog {
            identity: identity(&file.metadata()?),
            file,
            path: path.into(),
            waiting: VecDeque::new(),
            bytes: 0,
            dropped: 0,
            late: false,
            news: None,
            removed: false,
            looked: Instant::now(),
        })
    }

    /// Writes a line at once if possible, and otherwise keeps it for later.
    pub fn write(&mut self, line: String) {
        let line = (line + "\n").into_bytes();
        if self.bytes + line.len() > EVENTS_KEPT_BYTES_MAX {
            self.dropped += 1;
            return;
        }
        self.bytes += line.len();
        self.waiting.push_back(line);
        self.flush();
    }

    /// Writes as many of the waiting lines as possible.
    pub fn flush(&mut self) {
        while let Some(line) = self.waiting.front_mut() {
            match self.file.write(line) {
                Ok(n) if n > 0 => {
                    self.bytes -= n;
                    line.drain(..n);
                    if line.is_empty() {
                        self.waiting.pop_front();
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => {
                    let why = other.err().map_or_else(|| "nothing was written".to_owned(), |e| e.to_string());
                    if !std::mem::replace(&mut self.late, true) {
                        self.news = Some(format!(
                            "cannot write events to {}: {why}; training continues, and the events are kept in memory; they are lost if they still cannot be written when the job ends",
                            self.path.display()
                        ));
                    }
                    return;
                }
            }
        }
        if std::mem::take(&mut self.late) {
            let lost = match std::mem::take(&mut self.dropped) {
                0 => "nothing was lost".to_owned(),
                n => format!("{n} of them were lost, for lack of memory"),
            };
            self.news = Some(format!("events are written to {} again; {lost}", self.path.display()));
        }
    }

    /// Returns a notice if the file is no longer at its path. It is still written to, but only this
    /// process can read it. There is one such notice: what was removed does not come back.
    pub fn removal(&mut self) -> Option<String> {
        if self.removed {
            return None;
        }
        self.looked = Instant::now();
        self.removed = match std::fs::symlink_metadata(&self.path) {
            Ok(found) => identity(&found) != self.identity,
            // After any other error, nobody knows.
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        };
        self.removed.then(|| {
            format!(
                "{} was removed while the job was running: training continues, but the events of this run are lost, \
                 and everstep status and explain will not find it",
                self.path.parent().unwrap_or(&self.path).display()
            )
        })
    }

    /// Returns a notice for users, once after each change.
    pub fn news(&mut self) -> Option<String> {
        self.news.take()
    }
}

impl Driver {
    /// Writes waiting events, and notifies users through the agents of what became of them.
    pub(super) fn keep_events(&mut self) {
        self.events.flush();
        match self.events.news() {
            Some(what) if self.events.late => self.warn_users(&what),
            Some(what) => self.notify_users(&what),
            None => {}
        }
        if self.events.looked.elapsed() >= LOOK
            && let Some(what) = self.events.removal()
        {
            self.warn_users(&what);
        }
    }

    /// Writes facts about a job that do not come from the core.
    pub(super) fn write_all(&mut self, job: &str, facts: Vec<Fact>) {
        facts.into_iter().for_each(|fact| self.write(job, fact));
    }

    /// Writes a line about a job.
    pub(super) fn write(&mut self, job: &str, fact: Fact) {
        let line = LogLine { ts: self.seconds(), job: JobId(job.to_owned()), fact };
        match serde_json::to_string(&line) {
            // Written at once, so that a concurrent reader sees whole lines.
            Ok(text) => self.events.write(text),
            Err(e) => crate::say_warning!("an event cannot be written as JSON: {e}"),
        }
        self.dispatcher.add(line);
    }

    /// Returns the time of a line, in seconds since 1970. It never goes backwards.
    pub(super) fn seconds(&self) -> f64 {
        self.now().0 as f64 / 1000.0
    }

    /// Notifies users: on standard error, and through the agents, whose output they see.
    pub(super) fn notify_users(&mut self, what: &str) {
        crate::say!("{what}");
        self.notify_agents(what);
    }

    /// As [`Self::notify_users`], of a failure.
    pub(super) fn warn_users(&mut self, what: &str) {
        crate::say_warning!("{what}");
        self.notify_agents(what);
    }

    fn notify_agents(&mut self, what: &str) {
        let all: Vec<Session> = self.peers.keys().copied().collect();
        all.into_iter().for_each(|session| self.send(session, Order::Notice { what: what.to_owned() }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_file_that_is_removed_or_replaced_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut log = EventLog::open(&path).unwrap();
        assert_eq!(log.removal(), None);
        std::fs::remove_file(&path).unwrap();
        let told = log.removal().unwrap();
        assert!(told.starts_with(&format!("{} was removed", dir.path().display())), "{told}");
        assert_eq!(log.removal(), None);
        let mut log = EventLog::open(&path).unwrap();
        assert_eq!(log.removal(), None);
        std::fs::rename(EventLog::open(&dir.path().join("other")).unwrap().path, &path).unwrap();
        assert!(log.removal().is_some() && log.removal().is_none());
    }

    #[test]
    fn what_cannot_be_written_is_kept_and_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut log = EventLog::open(&path).unwrap();
        log.write("1".into());
        // A full disk, and then room again.
        let good =
            std::mem::replace(&mut log.file, std::fs::OpenOptions::new().append(true).open("/dev/full").unwrap());
        log.write("2".into());
        assert!(log.news().unwrap().contains("No space left"), "told once");
        log.flush();
        assert!(log.news().is_none(), "one line waits, and is tried again");
        log.write("3".into());
        assert!(log.news().is_none());
        log.file = good;
        log.flush();
        assert!(log.news().unwrap().contains("nothing was lost"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n3\n");
        // A reader that takes nothing: memory stays bounded.
        let fifo = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        log.file = std::fs::OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(&fifo).unwrap();
        for _ in 0..2 * EVENTS_KEPT_BYTES_MAX / 100_000 {
            log.write("x".repeat(100_000));
        }
        assert!(log.bytes <= EVENTS_KEPT_BYTES_MAX && log.dropped > 0);
    }
}

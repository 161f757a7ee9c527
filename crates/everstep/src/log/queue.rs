//! Lines on their way out. A thread writes them, because a terminal that is held (Ctrl-S), a pipe that
//! nobody reads or a file system that hangs must not stop a process that others count as lost when it
//! is silent. `tracing-appender` has such a queue, and panics where there is no thread to be had.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

/// Lines that wait at most. Those for which there is no room are lost.
const LINES: usize = 4096;
/// How long the end of a process waits for its last lines.
const AT_THE_END: Duration = Duration::from_secs(1);

/// Writes a line.
pub type Write = fn(&str);

enum Item {
    Line(Write, String),
    /// Everything before it is written.
    Flush(Sender<()>),
}

/// A queue and the number of lines that it had no room for.
struct Queue {
    to: SyncSender<Item>,
    lost: AtomicUsize,
}

static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Begins to write in a thread. Where there is none to be had, lines are written as before: at once.
pub fn start() {
    let (to, from) = sync_channel(LINES);
    if std::thread::Builder::new().name("everstep-log".into()).spawn(move || drain(&from)).is_ok() {
        let _ = QUEUE.set(Queue { to, lost: AtomicUsize::new(0) });
    }
}

fn drain(from: &Receiver<Item>) {
    for item in from {
        match item {
            Item::Line(write, line) => write(&line),
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

/// Writes a line, now or soon.
pub fn push(write: Write, line: String) {
    match QUEUE.get() {
        Some(queue) => queue.push(write, line),
        None => write(&line),
    }
}

impl Queue {
    fn push(&self, write: Write, line: String) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            self.offer(write, format!("everstep: {lost} lines were not written: nothing took them"), lost);
        }
        self.offer(write, line, 1);
    }

    /// Hands a line over that stands for `lines` if there is no room for it.
    fn offer(&self, write: Write, line: String, lines: usize) {
        if self.to.try_send(Item::Line(write, line)).is_err() {
            self.lost.fetch_add(lines, Ordering::Relaxed);
        }
    }
}

/// Waits until the lines so far are written, but not for ever.
pub fn flush() {
    let Some(queue) = QUEUE.get() else { return };
    let (done, written) = channel();
    if queue.to.try_send(Item::Flush(done)).is_ok() {
        let _ = written.recv_timeout(AT_THE_END);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static WRITTEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn write(line: &str) {
        WRITTEN.lock().unwrap().push(line.to_owned());
    }

    #[test]
    fn whoever_has_something_to_say_does_not_wait_for_its_writer() {
        let (to, from) = sync_channel(3);
        let queue = Queue { to, lost: AtomicUsize::new(0) };
        // Nobody takes lines yet: two find no room.
        (0..5).for_each(|n| queue.push(write, n.to_string()));
        let items: Vec<Item> = from.try_iter().collect();
        queue.push(write, "5".into());
        for item in items.into_iter().chain(from.try_iter()) {
            if let Item::Line(write, line) = item {
                write(&line);
            }
        }
        let written = WRITTEN.lock().unwrap().clone();
        let lost = "everstep: 2 lines were not written: nothing took them";
        assert_eq!(written, ["0", "1", "2", lost, "5"]);
    }
}

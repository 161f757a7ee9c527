//! Lines on their way out. A thread writes them, because a terminal that is held (Ctrl-S), a pipe
//! that nobody reads or a file system that hangs must not stop a process that others count as lost
//! when it is silent. `tracing-appender` has such a queue, and panics where there is no thread to
//! be had.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

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

static QUEUE: OnceLock<SyncSender<Item>> = OnceLock::new();
/// Lines for which there was no room since the last notice of that.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// Begins to write in a thread. Where there is none to be had, lines are written as before: at
/// once.
pub fn start() {
    let (to, from) = sync_channel(LINES);
    if std::thread::Builder::new().name("everstep-log".into()).spawn(move || drain(&from)).is_ok() {
        let _ = QUEUE.set(to);
    }
}

fn drain(from: &Receiver<Item>) {
    loop {
        let item = from.try_recv().ok().or_else(|| {
            // There is room again, also for this.
            let lost = LOST.swap(0, Ordering::Relaxed);
            if lost > 0 {
                crate::say_warning!("{lost} of everstep's log lines were dropped, because its output was blocked");
            }
            from.recv().ok()
        });
        match item {
            Some(Item::Line(write, line)) => write(&line),
            Some(Item::Flush(done)) => drop(done.send(())),
            None => return,
        }
    }
}

/// Writes a line, now or soon.
pub fn push(write: Write, line: String) {
    match QUEUE.get() {
        Some(queue) => offer(queue, &LOST, write, line),
        None => write(&line),
    }
}

fn offer(queue: &SyncSender<Item>, lost: &AtomicUsize, write: Write, line: String) {
    if queue.try_send(Item::Line(write, line)).is_err() {
        lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until the lines so far are written, but not for ever.
pub fn flush() {
    let Some(queue) = QUEUE.get() else { return };
    let until = Instant::now() + AT_THE_END;
    let (done, written) = channel();
    while queue.try_send(Item::Flush(done.clone())).is_err() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = written.recv_timeout(until.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_something_to_say_does_not_wait_for_its_writer() {
        let (queue, from) = sync_channel(3);
        let lost = AtomicUsize::new(0);
        // Nobody takes lines yet: two find no room.
        (0..5).for_each(|n| offer(&queue, &lost, |_| (), n.to_string()));
        let lines = from.try_iter().filter_map(|i| if let Item::Line(_, line) = i { Some(line) } else { None });
        assert_eq!(lines.collect::<Vec<_>>(), ["0", "1", "2"]);
        assert_eq!(lost.load(Ordering::Relaxed), 2);
    }
}

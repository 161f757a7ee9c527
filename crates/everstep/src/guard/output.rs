//! One stream of one worker: pipe → log file and console. The last lines are kept for explanations.

use super::protocol::Output;
use everstep_wire::private;
use everstep_wire::raw::Raw;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A log file that nobody requested starts again at this length.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Number of bytes kept for [`Pump::last_lines`].
const TAIL_BYTES: usize = 8 << 10;
/// Teed lines up to this length are shown whole, once complete. Longer ones are shown as they
/// arrive.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The destinations of a stream.
pub struct Sink {
    file: Option<File>,
    bytes: u64,
    output: Output,
    prefix: String,
    is_stderr: bool,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    /// Where the rest of a line goes that was too long to keep.
    overlong: Option<Overlong>,
    filtered: Option<File>,
}

/// A line that is shown as it arrives.
#[derive(Clone, Copy)]
struct Overlong {
    /// The line also goes to the filtered file, because its beginning contains one of the needles.
    filtered: bool,
}

impl Sink {
    /// Opens the log file. If that fails, only the console is served.
    pub fn new(output: &Output, prefix: &str, is_stderr: bool) -> Self {
        if let Some(parent) = Path::new(&output.file.0).parent() {
            let _ = private::make_directories(parent);
        }
        let append = |path: &Raw| private::open(Path::new(&path.0), OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND);
        let mut sink = Sink {
            file: None,
            bytes: 0,
            output: output.clone(),
            prefix: prefix.into(),
            is_stderr,
            line: Vec::new(),
            overlong: None,
            filtered: None,
        };
        match append(&output.file) {
            Ok(file) => sink.file = Some(file),
            Err(e) => sink.give_up_file(&e),
        }
        match output.filtered.as_ref().map(append) {
            Some(Ok(file)) => sink.filtered = Some(file),
            Some(Err(e)) => sink.give_up_filtered(&e),
            None => {}
        }
        sink
    }

    /// From now on, the console gets what the log file does not take, even if nobody wanted it
    /// there.
    fn give_up_file(&mut self, why: &io::Error) {
        self.file = None;
        let path = self.output.file.0.display();
        crate::say_warning!("cannot write {path}: {why}; from here on, this output is on the console only");
        if !self.output.console {
            self.output.console = true;
            // Without the prefix, it would not be clear whose output it is.
            self.output.prefixed = true;
        }
    }

    /// The lines for the filtered file are on the console, too.
    fn give_up_filtered(&mut self, why: &io::Error) {
        self.filtered = None;
        if let Some(path) = &self.output.filtered {
            let path = path.0.display();
            crate::say_warning!("cannot write {path}: {why}; from here on, its lines are on the console only");
        }
    }

    fn console(&self, bytes: &[u8]) {
        let _ = if self.is_stderr {
            std::io::stderr().lock().write_all(bytes)
        } else {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        };
    }

    /// Shows a line from its beginning, in one piece: ranks share the console and the filtered
    /// file.
    fn show(&mut self, line: &[u8]) -> Overlong {
        let whole = [self.prefix.as_bytes(), line].concat();
        self.console(&whole);
        let mut filtered = false;
        if let Some(file) = &mut self.filtered {
            let text = String::from_utf8_lossy(line);
            filtered = self.output.needles.iter().any(|n| text.contains(n.as_str()));
            if filtered && let Err(e) = file.write_all(&whole) {
                self.give_up_filtered(&e);
            }
        }
        Overlong { filtered }
    }

    /// Shows more of a line whose beginning was shown.
    fn show_more(&mut self, part: &[u8], of: Overlong) {
        self.console(part);
        if let Some(file) = self.filtered.as_mut().filter(|_| of.filtered)
            && let Err(e) = file.write_all(part)
        {
            self.give_up_filtered(&e);
        }
    }

    /// Handles a part of a line; `ends` if it is the last one, which includes the newline.
    fn part(&mut self, part: &[u8], ends: bool) {
        if let Some(of) = self.overlong {
            self.show_more(part, of);
            self.overlong = Some(of).filter(|_| !ends);
            return;
        }
        let long = self.line.len() + part.len() > LINE_BYTES_MAX;
        if !ends && !long {
            return self.line.extend_from_slice(part);
        }
        let mut line = std::mem::take(&mut self.line);
        line.extend_from_slice(part);
        let shown = self.show(&line);
        self.overlong = Some(shown).filter(|_| !ends);
    }

    fn take(&mut self, bytes: &[u8]) {
        let mut left = bytes;
        if let Some(file) = &mut self.file {
            self.bytes += bytes.len() as u64;
            if !self.output.asked && self.bytes > FILE_BYTES_MAX {
                let _ = file.set_len(0).and_then(|()| file.rewind());
                self.bytes = bytes.len() as u64;
            }
            let (written, trouble) = append(file, bytes);
            if let Some(e) = trouble {
                if !self.output.console {
                    left = bytes.get(written..).unwrap_or_default();
                }
                self.give_up_file(&e);
            }
        }
        if !self.output.console {
            return;
        }
        if !self.output.prefixed {
            return self.console(left);
        }
        for part in left.split_inclusive(|b| *b == b'\n') {
            self.part(part, part.ends_with(b"\n"));
        }
    }

    fn finish(&mut self) {
        if !self.line.is_empty() || self.overlong.is_some() {
            self.part(b"\n", true);
        }
    }
}

/// Writes as much as the file takes. Returns the number of bytes, and why it was not all of them.
fn append(file: &mut File, bytes: &[u8]) -> (usize, Option<io::Error>) {
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match file.write(rest) {
            Ok(0) => return (written, Some(ErrorKind::WriteZero.into())),
            Ok(n) => written += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return (written, Some(e)),
        }
    }
    (written, None)
}

/// A thread that moves one stream.
pub struct Pump {
    finished: Arc<AtomicBool>,
    tail: Arc<Mutex<Vec<u8>>>,
}

impl Pump {
    /// Starts to move `pipe` into `sink`.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn start(mut pipe: Box<dyn Read + Send>, mut sink: Sink) -> std::io::Result<Self> {
        let pump = Pump { finished: Arc::default(), tail: Arc::default() };
        let (finished, tail) = (pump.finished.clone(), pump.tail.clone());
        let work = move || {
            let mut bytes = vec![0u8; 64 << 10];
            while let Ok(n) = pipe.read(&mut bytes) {
                if n == 0 {
                    break;
                }
                if let Ok(mut tail) = tail.lock() {
                    tail.extend_from_slice(&bytes[..n]);
                    let surplus = tail.len().saturating_sub(TAIL_BYTES);
                    tail.drain(..surplus);
                }
                sink.take(&bytes[..n]);
            }
            sink.finish();
            finished.store(true, Ordering::Release);
        };
        std::thread::Builder::new().name("everstep-output".into()).spawn(work)?;
        Ok(pump)
    }

    /// Returns whether the stream has ended.
    pub fn finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// Returns the last bytes of the stream, as text.
    pub fn last_lines(&self) -> String {
        self.tail.lock().map(|t| String::from_utf8_lossy(&t).into_owned()).unwrap_or_default()
    }
}

//! One stream of one worker: pipe → log file and console. The last lines are kept for explanations.

use super::protocol::Output;
use everstep_wire::private;
use everstep_wire::raw::Raw;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{Read, Seek, Write};
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
        let append =
            |path: &Raw| private::open(Path::new(&path.0), OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND).ok();
        let file = append(&output.file);
        let filtered = output.filtered.as_ref().and_then(append);
        Sink {
            file,
            bytes: 0,
            output: output.clone(),
            prefix: prefix.into(),
            is_stderr,
            line: Vec::new(),
            overlong: None,
            filtered,
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
            if filtered {
                let _ = file.write_all(&whole);
            }
        }
        Overlong { filtered }
    }

    /// Shows more of a line whose beginning was shown.
    fn show_more(&mut self, part: &[u8], of: Overlong) {
        self.console(part);
        if let Some(file) = self.filtered.as_mut().filter(|_| of.filtered) {
            let _ = file.write_all(part);
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
        if let Some(file) = &mut self.file {
            self.bytes += bytes.len() as u64;
            if !self.output.asked && self.bytes > FILE_BYTES_MAX {
                let _ = file.set_len(0).and_then(|()| file.rewind());
                self.bytes = bytes.len() as u64;
            }
            let _ = file.write_all(bytes);
        }
        if !self.output.console {
            return;
        }
        if !self.output.prefixed {
            return self.console(bytes);
        }
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            self.part(part, part.ends_with(b"\n"));
        }
    }

    fn finish(&mut self) {
        if !self.line.is_empty() || self.overlong.is_some() {
            self.part(b"\n", true);
        }
    }
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

//! One stream of one worker: pipe → log file and console. The last lines are kept for explanations.

use super::protocol::Output;
use everstep_wire::private;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A log file that nobody asked for starts again at this length.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Bytes kept for [`Pump::last_lines`].
const TAIL_BYTES: usize = 8 << 10;

/// Where the bytes go.
pub struct Sink {
    file: Option<File>,
    bytes: u64,
    output: Output,
    prefix: String,
    is_stderr: bool,
    line: Vec<u8>,
    filtered: Option<File>,
}

impl Sink {
    /// Opens the log file; without it the console alone is served.
    pub fn new(output: &Output, prefix: &str, is_stderr: bool) -> Self {
        if let Some(parent) = Path::new(&output.file).parent() {
            let _ = private::make_directories(parent);
        }
        let append =
            |path: &String| private::open(Path::new(path), OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND).ok();
        let file = append(&output.file);
        let filtered = output.filtered.as_ref().and_then(append);
        Sink { file, bytes: 0, output: output.clone(), prefix: prefix.into(), is_stderr, line: Vec::new(), filtered }
    }

    fn console(&self, bytes: &[u8]) {
        let _ = if self.is_stderr {
            std::io::stderr().lock().write_all(bytes)
        } else {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        };
    }

    /// One whole line, in one piece: ranks share the console and the filtered file.
    fn show(&mut self, line: &[u8]) {
        let whole = [self.prefix.as_bytes(), line].concat();
        self.console(&whole);
        if let Some(file) = &mut self.filtered {
            let text = String::from_utf8_lossy(line);
            if self.output.needles.iter().any(|n| text.contains(n.as_str())) {
                let _ = file.write_all(&whole);
            }
        }
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
        self.line.extend_from_slice(bytes);
        while let Some(end) = self.line.iter().position(|b| *b == b'\n') {
            let rest = self.line.split_off(end + 1);
            let line = std::mem::replace(&mut self.line, rest);
            self.show(&line);
        }
    }

    fn finish(&mut self) {
        if self.output.prefixed && self.output.console && !self.line.is_empty() {
            let mut line = std::mem::take(&mut self.line);
            line.push(b'\n');
            self.show(&line);
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
    pub fn start(mut pipe: Box<dyn Read + Send>, mut sink: Sink) -> Self {
        let pump = Pump { finished: Arc::default(), tail: Arc::default() };
        let (finished, tail) = (pump.finished.clone(), pump.tail.clone());
        std::thread::spawn(move || {
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
        });
        pump
    }

    /// The stream has ended.
    pub fn finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// The end of what came through.
    pub fn last_lines(&self) -> String {
        self.tail.lock().map(|t| String::from_utf8_lossy(&t).into_owned()).unwrap_or_default()
    }
}

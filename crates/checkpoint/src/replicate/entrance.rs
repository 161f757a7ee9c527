//! The entrance to a holder: little memory and little time for peers that have not shown the job's
//! secret.

use super::conversation::Conversation;
use super::protocol::{Answer, Ask, SILENCE, VERSION};
use super::replica_holder::ReplicaHolder;
use everstep_wire::admission::{self, Admission, Pass, Trouble};
use everstep_wire::frame;
use everstep_wire::limits::{HELLO_BYTES_MAX, PROOF_TIMEOUT, REPLICA_STREAMS_MAX};
use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl ReplicaHolder {
    /// Accepts streams forever; `report` gets a line of text when that fails.
    pub fn serve(self: &Arc<Self>, listener: &TcpListener, report: fn(&str)) {
        let (admission, mut trouble) = (Admission::default(), Trouble::default());
        loop {
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(e) => {
                    let (pause, line) = trouble.failed("for replicas", &e);
                    line.as_deref().into_iter().for_each(report);
                    std::thread::sleep(pause);
                    continue;
                }
            };
            trouble.over();
            let Ok(local) = stream.local_addr() else { continue };
            let Some(pass) = admission.admit(admission::caller(local, peer)) else { continue };
            let holder = Arc::clone(self);
            let named = std::thread::Builder::new().name("everstep-holder".into());
            // Without a thread the stream is closed, and the other side tries again later.
            let _ = named.spawn(move || drop(holder.admitted(stream, pass)));
        }
    }

    /// Checks the peer's greeting, with little memory and little time, before anything else is
    /// read.
    fn admitted(&self, mut tcp: TcpStream, pass: Pass) -> io::Result<()> {
        tcp.set_nodelay(true)?;
        tcp.set_write_timeout(Some(SILENCE))?;
        let hello = frame::read_within(&mut Until::new(&tcp, PROOF_TIMEOUT), HELLO_BYTES_MAX)?;
        let Ask::Hello { version, token, job } = hello else { return Ok(()) };
        if version != VERSION || job != self.job || !self.token.get().is_some_and(|t| t.matches(&token)) {
            let why = "another job, another secret or another version".to_owned();
            return frame::write(&mut tcp, &Answer::Refused { why });
        }
        drop(pass);
        if self.streams.fetch_add(1, Ordering::AcqRel) >= REPLICA_STREAMS_MAX {
            self.streams.fetch_sub(1, Ordering::AcqRel);
            return frame::write(&mut tcp, &Answer::Refused { why: "too many streams".into() });
        }
        let ended = Conversation::new(self, tcp).run();
        self.streams.fetch_sub(1, Ordering::AcqRel);
        ended
    }
}

/// A stream that must have delivered all bytes by a point in time, however they are split.
pub(super) struct Until<'a> {
    tcp: &'a TcpStream,
    end: Instant,
}

impl<'a> Until<'a> {
    pub(super) fn new(tcp: &'a TcpStream, within: Duration) -> Self {
        Until { tcp, end: Instant::now() + within }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.end.checked_duration_since(Instant::now()).filter(|d| !d.is_zero());
        self.tcp.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        self.tcp.read(bytes)
    }
}

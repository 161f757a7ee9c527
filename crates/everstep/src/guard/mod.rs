//! The guard: a small process with one thread of control, between an agent and its workers.
//!
//! Why a separate process? When an agent is killed, something must end the workers and everything
//! they have started, including data-loader processes and daemons in their own sessions. A
//! parent-death signal does not cover grandchildren, and it is bound to the thread that spawned the
//! child. The guard is the sub-reaper of all these processes: any orphan becomes its child and can
//! be found. When the socket to the agent closes, the guard ends them all and exits. Until then, it
//! holds the node lock that it inherited, so the next agent on this node waits for exactly that.

pub mod output;
pub mod protocol;
mod tree;
mod warm;

use crate::guard::protocol::{Event, Launch, LocalWorker, ProcessExit, Request, WorkerEvent};
use everstep_core::id::Generation;
use everstep_core::message::Outcome;
use everstep_wire::frame;
use everstep_wire::limits::LAUNCH_FRAME_BYTES_MAX;
use everstep_wire::raw::Raw;
use output::{Pump, Sink};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use warm::Warmed;

/// How long the guard waits for the output of dead workers before it exits.
const DRAIN: Duration = Duration::from_secs(1);
/// How long the guard waits for a worker's last lines after its exit.
const LAST_WORDS: Duration = Duration::from_millis(60);

struct Worker {
    of: LocalWorker,
    pidfd: OwnedFd,
    pumps: Vec<Pump>,
    /// It was sent a signal.
    asked: bool,
}

struct Ending {
    generation: Generation,
    kill_at: Instant,
}

struct Guard {
    agent: UnixStream,
    inbox: Vec<u8>,
    workers: BTreeMap<u32, Worker>,
    /// Streams of workers that have exited.
    draining: Vec<Pump>,
    ending: Option<Ending>,
    agent_gone: bool,
    /// A process with torch imported.
    warmed: Option<Warmed>,
    /// Standard input of the workers: that of `everstep run`.
    input: OwnedFd,
}

/// Runs the guard with its standard input as the socket to the agent. It holds the node `lock`, and
/// workers get `input` as their standard input. Returns when the agent and all workers are gone.
pub fn run(lock: i32, input: i32) -> i32 {
    // SAFETY: the agent passed this descriptor on; it stays open for the life of this process.
    let lock = unsafe { std::os::fd::BorrowedFd::borrow_raw(lock) };
    // Workers must not inherit the node lock: processes that they leave behind would hold it.
    let _ = rustix::io::fcntl_setfd(lock, rustix::io::FdFlags::CLOEXEC);
    // SAFETY: as above.
    let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(input) };
    let Ok(input) = rustix::io::fcntl_dupfd_cloexec(input, 3) else { return 1 };
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let _ = rustix::process::setsid();
    // With the guard, its workers would be killed in the middle of a save.
    crate::signals::outlive();
    let Ok(socket) = std::io::stdin().as_fd().try_clone_to_owned() else { return 1 };
    let agent = UnixStream::from(socket);
    let _ = agent.set_nonblocking(true);
    let mut guard = Guard {
        agent,
        inbox: Vec::new(),
        workers: BTreeMap::new(),
        draining: Vec::new(),
        ending: None,
        agent_gone: false,
        warmed: None,
        input,
    };
    loop {
        guard.wait();
        // A worker that is dead already was not ended by the request that is read next.
        guard.reap();
        guard.receive();
        guard.reap();
        guard.read_template();
        guard.progress();
        if guard.agent_gone && tree::descendants(None).is_empty() {
            guard.drain();
            return 0;
        }
    }
}

impl Guard {
    /// Sleeps until the agent sends something, a worker exits, or a deadline passes.
    fn wait(&self) {
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        if !self.agent_gone {
            fds.push(PollFd::new(&self.agent, PollFlags::IN));
        }
        fds.extend(self.workers.values().map(|w| PollFd::new(&w.pidfd, PollFlags::IN)));
        let warming = self.warmed.as_ref().filter(|w| !w.ready).map(Warmed::socket);
        fds.extend(warming.map(|s| PollFd::from_borrowed_fd(s, PollFlags::IN)));
        let limit = if self.ending.is_some() || self.agent_gone { 5_000_000 } else { 1_000_000_000 };
        let timeout = Timespec { tv_sec: limit / 1_000_000_000, tv_nsec: limit % 1_000_000_000 };
        let _ = poll(&mut fds, Some(&timeout));
    }

    fn receive(&mut self) {
        let mut bytes = [0u8; 65536];
        loop {
            match self.agent.read(&mut bytes) {
                Ok(0) => {
                    self.agent_gone = true;
                    break;
                }
                Ok(n) => self.inbox.extend_from_slice(&bytes[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.agent_gone = true;
                    break;
                }
            }
        }
        loop {
            let request = match frame::take_within::<Request>(&mut self.inbox, LAUNCH_FRAME_BYTES_MAX) {
                Ok(Some(request)) => request,
                Ok(None) => return,
                Err(e) => {
                    // Nothing after it can be decoded: end the workers, as if the agent were gone.
                    crate::say_warning!("the guard cannot read what its agent asks for: {e}");
                    self.agent_gone = true;
                    return;
                }
            };
            match request {
                Request::Launch(launch) => self.launch(*launch),
                Request::Warm(template) => match Warmed::start(&template) {
                    Ok(warmed) => self.warmed = Some(warmed),
                    Err(why) => self.send_event(&Event::Warmed { why_not: Some(why.to_string()) }),
                },
                Request::Cool => self.warmed = None,
                Request::Signal { signal } => self.signal(signal),
                Request::End { generation, grace_ms } => {
                    if grace_ms > 0 {
                        self.signal(15);
                    }
                    self.workers.values_mut().for_each(|w| w.asked = true);
                    let kill_at = Instant::now() + Duration::from_millis(grace_ms);
                    self.ending = Some(Ending { generation, kill_at });
                }
            }
        }
    }

    fn send_event(&mut self, event: &Event) {
        if let Ok(bytes) = frame::encode(event) {
            let _ = self.agent.set_nonblocking(false);
            let _ = self.agent.write_all(&bytes);
            let _ = self.agent.set_nonblocking(true);
        }
    }

    fn signal(&mut self, signal: i32) {
        let Some(signal) = Signal::from_named_raw(signal) else { return };
        for (pid, worker) in &mut self.workers {
            worker.asked = true;
            if let Some(pid) = Pid::from_raw(*pid as i32) {
                let _ = rustix::process::kill_process_group(pid, signal);
            }
        }
    }

    /// Handles the template's first message, or its end.
    fn read_template(&mut self) {
        let Some(warmed) = self.warmed.as_mut().filter(|w| !w.ready) else { return };
        let mut fds = [PollFd::from_borrowed_fd(warmed.socket(), PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(poll(&mut fds, Some(&none)), Ok(n) if n > 0) {
            return;
        }
        let why_not = warmed.read_first_message().err().map(|why| why.to_string());
        if why_not.is_some() {
            self.warmed = None;
        }
        self.send_event(&Event::Warmed { why_not });
    }

    /// Forks from the warm process, if there is one and the launch allows it.
    fn launch_warm(&mut self, launch: &Launch) -> Option<Started> {
        let warmed = self.warmed.as_mut().filter(|w| w.ready && launch.warm.is_some())?;
        let start = || -> std::io::Result<_> { Ok((std::io::pipe()?, std::io::pipe()?)) };
        let ((out, out_end), (err, err_end)) = start().ok()?;
        match warmed.fork(launch, [self.input.as_fd(), out_end.as_fd(), err_end.as_fd()]) {
            Ok(pid) => watch(pid, Box::new(out), Box::new(err), launch).ok(),
            Err(why) => {
                // If it has forked a process meanwhile, that is not one of our workers.
                self.warmed = None;
                self.send_event(&Event::Warmed { why_not: Some(why.to_string()) });
                None
            }
        }
    }

    fn launch(&mut self, launch: Launch) {
        let worker = launch.worker;
        crate::log::set("generation", worker.generation.0);
        let started = self.launch_warm(&launch).map_or_else(|| spawn(&launch, self.input.as_fd()), Ok);
        let what = match started {
            Ok((pid, pidfd, pumps)) => {
                self.workers.insert(pid, Worker { of: worker, pidfd, pumps, asked: false });
                WorkerEvent::Launched { pid }
            }
            Err(why) => WorkerEvent::NotLaunched { why },
        };
        self.send_event(&Event::Worker { worker, what });
    }

    /// Collects all children that have exited: workers, and orphans that the guard has adopted.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(worker) = self.workers.remove(&(pid.as_raw_nonzero().get() as u32)) else { continue };
            let outcome = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Outcome::Code(code),
                (None, Some(signal)) => Outcome::Signal(signal),
                (None, None) => Outcome::Code(-1),
            };
            let deadline = Instant::now() + LAST_WORDS;
            while outcome != Outcome::Code(0) && worker.pumps.iter().any(|p| !p.finished()) && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            let last_lines = worker.pumps.iter().map(Pump::last_lines).next_back().unwrap_or_default();
            let pid = pid.as_raw_nonzero().get() as u32;
            let exit = ProcessExit { pid, outcome, asked: worker.asked, last_lines };
            self.send_event(&Event::Worker { worker: worker.of, what: WorkerEvent::Exited(exit) });
            self.draining.retain(|p| !p.finished());
            self.draining.extend(worker.pumps);
        }
    }

    /// Waits for the remaining output of workers, so that none is lost when the guard exits.
    fn drain(&mut self) {
        let pumps = self.workers.values().flat_map(|w| &w.pumps).chain(&self.draining);
        let deadline = Instant::now() + DRAIN;
        for pump in pumps {
            while !pump.finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    fn progress(&mut self) {
        if self.agent_gone {
            self.warmed = None;
            tree::kill_all(None);
            return;
        }
        let spared = self.warmed.as_ref().map(Warmed::pid);
        let Some(ending) = &self.ending else { return };
        let left = tree::descendants(spared);
        if left.is_empty() && self.workers.is_empty() {
            let generation = ending.generation;
            self.ending = None;
            self.send_event(&Event::Gone { generation });
        } else if Instant::now() >= ending.kill_at || self.workers.is_empty() {
            // Once the workers are gone, there is no reason to wait for what they started.
            tree::kill_all(spared);
        }
    }
}

type Started = (u32, OwnedFd, Vec<Pump>);

/// Runs between fork and exec: makes this process end when the guard does.
fn die_with(guard: u32) -> std::io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The guard may have died before the signal was armed.
    if rustix::process::getppid().is_none_or(|p| p.as_raw_nonzero().get() as u32 != guard) {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    }
    Ok(())
}

fn cannot_run(program: &Raw, e: &std::io::Error) -> String {
    format!("cannot run {}: {e}{}", program.0.display(), advice(e))
}

/// Returns advice for when the kernel refuses to start a process.
pub fn advice(e: &std::io::Error) -> &'static str {
    match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::TOOBIG) => {
            "; the kernel limits arguments and environment to a quarter of the stack limit (ulimit -s), and each \
             variable to 128 KiB: unset large variables or raise the limit"
        }
        Some(rustix::io::Errno::AGAIN) => {
            "; the limit of processes is reached (ulimit -u, or pids.max of the control group)"
        }
        Some(rustix::io::Errno::FBIG) => "; a file would exceed the size limit (ulimit -f): raise it",
        _ => "",
    }
}

/// Starts a worker as a new process in its own session, as torchrun does.
fn spawn(launch: &Launch, input: BorrowedFd<'_>) -> Result<Started, String> {
    let program = launch.argv.first().ok_or("nothing to run")?;
    let mut command = Command::new(program);
    command.args(&launch.argv[1..]).env_clear().envs(launch.env.iter().map(|(name, value)| (name, value)));
    let input = input.try_clone_to_owned().map_err(|e| e.to_string())?;
    command.stdin(Stdio::from(input)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let guard = std::process::id();
    let mut cpus = rustix::thread::CpuSet::new();
    launch.cpus.iter().for_each(|c| cpus.set(*c as usize));
    let bind = !launch.cpus.is_empty();
    // SAFETY: only async-signal-safe calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            die_with(guard)?;
            if bind {
                rustix::thread::sched_setaffinity(None, &cpus)?;
            }
            Ok(())
        });
    }
    crate::descriptors::restore(&mut command);
    let mut child = command.spawn().map_err(|e| cannot_run(program, &e))?;
    let (out, err) = (child.stdout.take().ok_or("no pipe")?, child.stderr.take().ok_or("no pipe")?);
    let started = watch(child.id(), Box::new(out), Box::new(err), launch);
    // `reap` collects it, like all other children.
    std::mem::forget(child);
    started
}

/// Watches for a worker's exit, and moves its output.
fn watch(pid: u32, out: Box<dyn Read + Send>, err: Box<dyn Read + Send>, launch: &Launch) -> Result<Started, String> {
    let target = Pid::from_raw(pid as i32).ok_or("no process id")?;
    let pidfd = pidfd_open(target, PidfdFlags::empty()).map_err(|e| {
        format!("cannot watch a worker: {e}; pidfd_open requires Linux 5.3 and a container that allows it")
    })?;
    // If nothing read its output, a worker would stop at the first full pipe.
    let start = |pipe, sink| {
        Pump::start(pipe, sink).map_err(|e| {
            let _ = rustix::process::kill_process_group(target, Signal::KILL);
            format!("cannot start a thread for its output: {e}; raise the limit of processes (ulimit -u, or pids.max of the control group)")
        })
    };
    let out = start(out, Sink::new(&launch.stdout, &launch.prefix, false))?;
    let err = start(err, Sink::new(&launch.stderr, &launch.prefix, true))?;
    Ok((pid, pidfd, vec![out, err]))
}

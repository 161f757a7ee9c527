//! Threads that copy, created once and used for every capture.
//!
//! A thread per capture would cost each step a `clone` and would fail where a pids cgroup refuses
//! one more. Where no thread can be created at all, the caller does the work itself, and
//! [`take_trouble`] reports it once.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Work for a thread.
pub type Job = Box<dyn FnOnce() + Send>;

/// Nice value of threads that copy while the next iteration computes.
const BACKGROUND_NICE: i32 = 10;
/// Threads of each kind. More of them gain nothing, because memory bandwidth is the limit.
const THREADS_MAX: usize = 4;

#[derive(Default)]
struct Pool {
    /// Process that the threads belong to: a forked child has none of them.
    process: Option<u32>,
    threads: usize,
    idle: usize,
    jobs: VecDeque<Job>,
    trouble: Option<String>,
    /// Whether the trouble was reported to the user.
    reported: bool,
}

/// Threads of one kind.
pub struct Copiers {
    pool: Mutex<Pool>,
    work: Condvar,
    nice: i32,
}

/// Threads for copies that the training loop waits for.
pub static FOREGROUND: Copiers = Copiers::new(0);
/// Threads for copies that the next iteration does not wait for. Everything else that needs a core
/// has precedence.
pub static BACKGROUND: Copiers = Copiers::new(BACKGROUND_NICE);

impl Copiers {
    const fn new(nice: i32) -> Self {
        let pool = Pool { process: None, threads: 0, idle: 0, jobs: VecDeque::new(), trouble: None, reported: false };
        Copiers { pool: Mutex::new(pool), work: Condvar::new(), nice }
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a job to a thread.
    ///
    /// # Errors
    /// Returns the job itself when there is no thread and none can be created: the caller runs it.
    pub fn submit(&'static self, job: Job) -> Result<(), Job> {
        let mut pool = self.lock();
        let own = std::process::id();
        if pool.process != Some(own) {
            let reported = pool.reported;
            *pool = Pool { process: Some(own), reported, ..Pool::default() };
        }
        if pool.jobs.len() >= pool.idle && pool.threads < THREADS_MAX {
            let named = std::thread::Builder::new().name("everstep-copy".into());
            match named.spawn(move || self.serve()) {
                Ok(_) => pool.threads += 1,
                Err(e) if !pool.reported => {
                    pool.reported = true;
                    pool.trouble = Some(format!(
                        "no thread can be created to copy checkpoints ({e}); the training thread copies them, which takes \
                         longer; raise the limit on threads (pids cgroup, ulimit -u)"
                    ));
                }
                Err(_) => {}
            }
        }
        if pool.threads == 0 {
            return Err(job);
        }
        pool.jobs.push_back(job);
        drop(pool);
        self.work.notify_one();
        Ok(())
    }

    fn serve(&self) {
        if self.nice > 0 {
            // On Linux, this changes the nice value of this thread only.
            let _ = rustix::process::setpriority_process(None, self.nice);
        }
        let mut pool = self.lock();
        loop {
            while let Some(job) = pool.jobs.pop_front() {
                drop(pool);
                job();
                pool = self.lock();
            }
            pool.idle += 1;
            pool = self.work.wait(pool).unwrap_or_else(PoisonError::into_inner);
            pool.idle -= 1;
        }
    }
}

/// Returns the message about missing threads for the user, and returns each message once.
pub fn take_trouble() -> Option<String> {
    [&FOREGROUND, &BACKGROUND].into_iter().find_map(|c| c.lock().trouble.take())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::mpsc;

    #[test]
    fn a_thousand_jobs_share_a_few_threads() {
        static COPIERS: Copiers = Copiers::new(0);
        let (sender, receiver) = mpsc::channel();
        for _ in 0..1000 {
            let sender = sender.clone();
            let job = Box::new(move || sender.send(format!("{:?}", std::thread::current().id())).unwrap());
            assert!(COPIERS.submit(job).is_ok());
        }
        let threads: BTreeSet<String> = receiver.iter().take(1000).collect();
        assert!((1..=THREADS_MAX).contains(&threads.len()), "{threads:?}");
    }
}

//! The contents of a process-group store, and the clients waiting for keys. All memory is counted.

use everstep_wire::limits::STORE_BYTES_MAX;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Memory that an entry needs besides its bytes.
const ENTRY: u64 = 96;

/// One client that waits for keys.
struct Waiter {
    /// Number of keys that do not exist yet.
    missing: usize,
    keys: Vec<Vec<u8>>,
    wake: Arc<Notify>,
}

#[derive(Default)]
struct Keys {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    queues: BTreeMap<Vec<u8>, VecDeque<Vec<u8>>>,
    waiters: BTreeMap<u64, Waiter>,
    /// Waiters by key: setting a key wakes only these.
    awaited: BTreeMap<Vec<u8>, Vec<u64>>,
    next: u64,
    bytes: u64,
}

/// The keys of one generation.
#[derive(Default)]
pub struct Shared {
    keys: Mutex<Keys>,
}

/// Room reserved for bytes being received.
pub(super) struct Reserved<'a> {
    shared: &'a Shared,
    bytes: u64,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.shared.lock().bytes -= self.bytes;
    }
}

/// A wait in progress. Dropping it cancels the wait.
pub(super) struct Wait<'a> {
    shared: &'a Shared,
    id: u64,
    pub(super) wake: Arc<Notify>,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.shared.lock().forget(self.id);
    }
}

fn full() -> io::Error {
    let why = format!("the process group's store would hold more than {} MiB", STORE_BYTES_MAX >> 20);
    io::Error::new(io::ErrorKind::StorageFull, why)
}

impl Keys {
    fn take_room(&mut self, bytes: u64) -> io::Result<()> {
        let now = self.bytes.checked_add(bytes).filter(|now| *now <= STORE_BYTES_MAX);
        self.bytes = now.ok_or_else(full)?;
        Ok(())
    }

    fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> io::Result<()> {
        let old = self.values.get(&key).map_or(0, |v| cost(&key, v.len()));
        self.bytes -= old;
        if let Err(e) = self.take_room(cost(&key, value.len())) {
            self.bytes += old;
            return Err(e);
        }
        self.appeared(&key);
        self.values.insert(key, value);
        Ok(())
    }

    fn holds(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|q| !q.is_empty())
    }

    fn appeared(&mut self, key: &[u8]) {
        for id in self.awaited.remove(key).unwrap_or_default() {
            let Some(waiter) = self.waiters.get_mut(&id) else { continue };
            waiter.missing -= 1;
            if waiter.missing == 0 {
                waiter.wake.notify_one();
            }
        }
    }

    fn forget(&mut self, id: u64) {
        let Some(waiter) = self.waiters.remove(&id) else { return };
        self.bytes -= waiter.keys.iter().map(|k| cost(k, k.len())).sum::<u64>();
        for key in waiter.keys {
            if let Some(ids) = self.awaited.get_mut(&key) {
                ids.retain(|i| *i != id);
                if ids.is_empty() {
                    self.awaited.remove(&key);
                }
            }
        }
    }
}

fn cost(key: &[u8], value: usize) -> u64 {
    key.len() as u64 + value as u64 + ENTRY
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for bytes that are about to be read.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<Reserved<'_>> {
        self.lock().take_room(bytes)?;
        Ok(Reserved { shared: self, bytes })
    }

    pub(super) fn all_there(&self, keys: &[Vec<u8>]) -> bool {
        let held = self.lock();
        keys.iter().all(|key| held.holds(key))
    }

    pub(super) fn get(&self, key: &[u8]) -> Vec<u8> {
        self.lock().values.get(key).cloned().unwrap_or_default()
    }

    pub(super) fn set(&self, key: Vec<u8>, value: Vec<u8>) -> io::Result<()> {
        self.lock().set(key, value)
    }

    /// Like TCPStore: sets the key if its value is the expected one, or if it is new and nothing is
    /// expected.
    pub(super) fn compare_set(&self, key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut held = self.lock();
        match held.values.get(&key) {
            None if !expected.is_empty() => return Ok(expected),
            Some(now) if *now != expected => return Ok(now.clone()),
            _ => {}
        }
        held.set(key, desired.clone())?;
        Ok(desired)
    }

    /// Like TCPStore: numbers are stored as decimal text.
    pub(super) fn add(&self, key: Vec<u8>, amount: i64) -> io::Result<i64> {
        let mut held = self.lock();
        let text = held.values.get(&key).and_then(|v| std::str::from_utf8(v).ok());
        let now = text.and_then(|t| t.trim().parse::<i64>().ok()).unwrap_or(0);
        let sum = now.wrapping_add(amount);
        held.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    pub(super) fn append(&self, key: Vec<u8>, more: &[u8]) -> io::Result<()> {
        let mut held = self.lock();
        let new = if held.values.contains_key(&key) { 0 } else { cost(&key, 0) };
        held.take_room(new + more.len() as u64)?;
        held.appeared(&key);
        held.values.entry(key).or_default().extend_from_slice(more);
        Ok(())
    }

    pub(super) fn delete(&self, key: &[u8]) -> bool {
        let mut held = self.lock();
        let value = held.values.remove(key).map(|v| cost(key, v.len()));
        let queue = held.queues.remove(key).map(|q| q.iter().map(|v| cost(key, v.len())).sum::<u64>());
        held.bytes -= value.unwrap_or(0) + queue.unwrap_or(0);
        value.is_some() | queue.is_some()
    }

    pub(super) fn count(&self) -> usize {
        let held = self.lock();
        held.values.len() + held.queues.len()
    }

    pub(super) fn names(&self) -> Vec<Vec<u8>> {
        let held = self.lock();
        held.values.keys().chain(held.queues.keys()).cloned().collect()
    }

    pub(super) fn push(&self, key: Vec<u8>, value: Vec<u8>) -> io::Result<()> {
        let mut held = self.lock();
        held.take_room(cost(&key, value.len()))?;
        held.appeared(&key);
        held.queues.entry(key).or_default().push_back(value);
        Ok(())
    }

    pub(super) fn pop(&self, key: &[u8]) -> Option<Vec<u8>> {
        let mut held = self.lock();
        let queue = held.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        // The key of an empty queue would not be counted.
        if queue.is_empty() {
            held.queues.remove(key);
        }
        held.bytes -= cost(key, value.len());
        Some(value)
    }

    pub(super) fn queued(&self, key: &[u8]) -> usize {
        self.lock().queues.get(key).map_or(0, VecDeque::len)
    }

    /// Compares the bytes counted with those held, while no client sends a request. A store that
    /// counts too little has no limit.
    ///
    /// # Errors
    /// A message with both numbers, or about a queue that is not counted.
    pub fn audit(&self) -> Result<(), String> {
        let held = self.lock();
        let values: u64 = held.values.iter().map(|(key, value)| cost(key, value.len())).sum();
        let queued =
            |(key, queue): (&Vec<u8>, &VecDeque<Vec<u8>>)| queue.iter().map(|v| cost(key, v.len())).sum::<u64>();
        let queues: u64 = held.queues.iter().map(queued).sum();
        let waits: u64 = held.waiters.values().flat_map(|w| &w.keys).map(|k| cost(k, k.len())).sum();
        let (counted, found) = (held.bytes, values + queues + waits);
        if counted != found {
            return Err(format!("{counted} bytes are counted, but {found} are held"));
        }
        match held.queues.iter().find(|(_, queue)| queue.is_empty()) {
            Some((key, _)) => Err(format!("the empty queue {} is kept but not counted", key.escape_ascii())),
            None => Ok(()),
        }
    }

    /// Waits for keys. Returns `None` if all exist already.
    pub(super) fn wait(&self, mut keys: Vec<Vec<u8>>) -> io::Result<Option<Wait<'_>>> {
        let mut held = self.lock();
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| !held.holds(key));
        if keys.is_empty() {
            return Ok(None);
        }
        held.take_room(keys.iter().map(|k| cost(k, k.len())).sum())?;
        let (id, wake) = (held.next, Arc::new(Notify::new()));
        held.next += 1;
        for key in &keys {
            held.awaited.entry(key.clone()).or_default().push(id);
        }
        held.waiters.insert(id, Waiter { missing: keys.len(), keys, wake: wake.clone() });
        Ok(Some(Wait { shared: self, id, wake }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(shared: &Shared) -> u64 {
        shared.lock().bytes
    }

    #[test]
    fn all_that_is_kept_is_counted_and_counted_off() {
        let shared = Shared::default();
        let key = || b"k".to_vec();
        shared.set(key(), vec![0; 100]).unwrap();
        shared.set(key(), vec![0; 10]).unwrap();
        assert_eq!(held(&shared), 11 + ENTRY);
        shared.append(key(), b"abc").unwrap();
        shared.push(b"q".to_vec(), vec![1; 50]).unwrap();
        shared.push(b"q".to_vec(), vec![1; 50]).unwrap();
        assert_eq!(shared.pop(b"q").map(|v| v.len()), Some(50));
        shared.push(b"empty".to_vec(), vec![1; 5]).unwrap();
        assert_eq!(shared.pop(b"empty").map(|v| v.len()), Some(5));
        assert_eq!((shared.audit(), shared.pop(b"empty"), shared.count()), (Ok(()), None, 2));
        drop(shared.reserve(1000).unwrap());
        drop(shared.wait(vec![b"x".to_vec(), b"x".to_vec(), key()]).unwrap());
        assert!(shared.delete(b"k") && shared.delete(b"q") && !shared.delete(b"q"));
        assert_eq!(held(&shared), 0);
        assert!(shared.lock().awaited.is_empty() && shared.lock().waiters.is_empty());
    }

    #[test]
    fn more_than_the_limit_is_refused_and_changes_nothing() {
        let shared = Shared::default();
        let most = shared.reserve(STORE_BYTES_MAX - 200).unwrap();
        shared.set(b"a".to_vec(), b"1".to_vec()).unwrap();
        assert!(shared.set(b"a".to_vec(), vec![0; 300]).is_err());
        assert!(shared.append(b"a".to_vec(), &[0; 300]).is_err() && shared.push(b"q".to_vec(), vec![0; 300]).is_err());
        assert!(shared.wait(vec![vec![b'w'; 300]]).is_err() && shared.reserve(300).is_err());
        assert_eq!(shared.get(b"a"), b"1");
        drop(most);
        shared.set(b"a".to_vec(), vec![0; 300]).unwrap();
    }

    #[tokio::test]
    async fn a_wait_ends_with_its_last_key_and_others_do_not_wake_it() {
        let shared = Shared::default();
        let wait = shared.wait(vec![b"a".to_vec(), b"b".to_vec()]).unwrap().unwrap();
        for i in 0..1000u32 {
            shared.set(i.to_le_bytes().to_vec(), vec![]).unwrap();
        }
        shared.set(b"a".to_vec(), vec![]).unwrap();
        let early = tokio::time::timeout(std::time::Duration::ZERO, wait.wake.notified()).await;
        assert!(early.is_err());
        shared.add(b"b".to_vec(), 1).unwrap();
        wait.wake.notified().await;
    }
}

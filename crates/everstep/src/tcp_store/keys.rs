//! The contents of a process-group store, and the clients waiting for keys. All memory is counted.

use super::memory_budget::{ENTRY, Held, MemoryBudget, Reserved};
use everstep_wire::limits::STORE_VALUE_BYTES_MAX;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// One client that waits for keys.
struct Waiter {
    /// Number of keys that do not exist yet.
    missing: usize,
    keys: Vec<Held>,
    wake: Arc<Notify>,
}

/// The reservation of each value and of each entry in a queue includes its key.
#[derive(Default)]
struct Keys {
    /// Values are shared with the clients to which they are being sent.
    values: BTreeMap<Vec<u8>, Arc<Held>>,
    queues: BTreeMap<Vec<u8>, VecDeque<Held>>,
    waiters: BTreeMap<u64, Waiter>,
    /// Waiters by key: setting a key wakes only these.
    awaited: BTreeMap<Vec<u8>, Vec<u64>>,
    next: u64,
}

/// The keys of one generation.
#[derive(Default)]
pub struct Shared {
    keys: Mutex<Keys>,
    budget: MemoryBudget,
}

/// Memory that the budget counts wrongly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    #[error("{counted} bytes are counted, but {held} are held")]
    Miscounted { counted: u64, held: u64 },
    /// A key without values: only the reservations of values include their key.
    #[error("the empty queue {} is kept but not counted", .0.escape_ascii())]
    EmptyQueue(Vec<u8>),
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

fn too_long() -> io::Error {
    let why = format!(
        "a value in the process-group store would be longer than {} MiB after an append",
        STORE_VALUE_BYTES_MAX >> 20
    );
    io::Error::new(io::ErrorKind::StorageFull, why)
}

impl Keys {
    fn set(&mut self, key: Held, mut value: Held) -> Arc<Held> {
        let (key, reserved) = key.split();
        value.absorb(reserved);
        self.appeared(&key);
        let value = Arc::new(value);
        self.values.insert(key, value.clone());
        value
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
        for key in waiter.keys {
            if let Some(ids) = self.awaited.get_mut(&*key) {
                ids.retain(|i| *i != id);
                if ids.is_empty() {
                    self.awaited.remove(&*key);
                }
            }
        }
    }
}

/// Bytes that a stored value takes.
fn cost(key: &[u8], value: usize) -> u64 {
    key.len() as u64 + value as u64 + ENTRY
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves memory for bytes that are about to be read.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<Reserved> {
        self.budget.take(bytes)
    }

    pub(super) fn all_there(&self, keys: &[Held]) -> bool {
        let held = self.lock();
        keys.iter().all(|key| held.holds(key))
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<Arc<Held>> {
        self.lock().values.get(key).cloned()
    }

    pub(super) fn set(&self, key: Held, value: Held) {
        self.lock().set(key, value);
    }

    /// Like TCPStore: sets the key if its value is the expected one, or if it is new and nothing is
    /// expected.
    pub(super) fn compare_set(&self, key: Held, expected: Held, desired: Held) -> Arc<Held> {
        let mut held = self.lock();
        match held.values.get(&*key) {
            None if !expected.is_empty() => return Arc::new(expected),
            Some(now) if now[..] != expected[..] => return now.clone(),
            _ => {}
        }
        held.set(key, desired)
    }

    /// Like TCPStore: numbers are stored as decimal text.
    pub(super) fn add(&self, key: Held, amount: i64) -> io::Result<i64> {
        let mut held = self.lock();
        let text = held.values.get(&*key).and_then(|v| std::str::from_utf8(v).ok());
        let now = text.and_then(|t| t.trim().parse::<i64>().ok()).unwrap_or(0);
        let sum = now.wrapping_add(amount);
        let text = sum.to_string().into_bytes();
        let reserved = self.budget.take(text.len() as u64)?;
        held.set(key, Held::new(text, reserved));
        Ok(sum)
    }

    pub(super) fn append(&self, key: Held, more: Held) -> io::Result<()> {
        let mut held = self.lock();
        let Some(now) = held.values.get_mut(&*key) else {
            held.set(key, more);
            return Ok(());
        };
        if (now.len() + more.len()) as u64 > STORE_VALUE_BYTES_MAX {
            return Err(too_long());
        }
        if let Some(alone) = Arc::get_mut(now) {
            return alone.extend(&more);
        }
        // The old value is being sent to somebody.
        let reserved = self.budget.take(cost(&key, now.len() + more.len()))?;
        *now = Arc::new(Held::new([&***now, &*more].concat(), reserved));
        Ok(())
    }

    pub(super) fn delete(&self, key: &[u8]) -> bool {
        let mut held = self.lock();
        let value = held.values.remove(key);
        let queue = held.queues.remove(key);
        value.is_some() | queue.is_some()
    }

    pub(super) fn count(&self) -> usize {
        let held = self.lock();
        held.values.len() + held.queues.len()
    }

    /// Returns the names of all keys, and the reservation for them.
    pub(super) fn names(&self) -> io::Result<(Vec<Vec<u8>>, Reserved)> {
        let held = self.lock();
        let names = || held.values.keys().chain(held.queues.keys());
        let reserved = self.budget.take(names().map(|key| cost(key, 0)).sum())?;
        Ok((names().cloned().collect(), reserved))
    }

    pub(super) fn push(&self, key: Held, mut value: Held) {
        let (key, reserved) = key.split();
        value.absorb(reserved);
        let mut held = self.lock();
        held.appeared(&key);
        held.queues.entry(key).or_default().push_back(value);
    }

    pub(super) fn pop(&self, key: &[u8]) -> Option<Held> {
        let mut held = self.lock();
        let queue = held.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        // The key of an empty queue would not be counted.
        if queue.is_empty() {
            held.queues.remove(key);
        }
        Some(value)
    }

    pub(super) fn queued(&self, key: &[u8]) -> usize {
        self.lock().queues.get(key).map_or(0, VecDeque::len)
    }

    /// Compares the bytes counted with those held, while no client sends a request. A store that
    /// counts too little has no limit.
    ///
    /// # Errors
    /// Fails if the numbers differ, or if an empty queue is kept.
    pub fn audit(&self) -> Result<(), AuditError> {
        let held = self.lock();
        let values: u64 = held.values.iter().map(|(key, value)| cost(key, value.len())).sum();
        let queued = |(key, queue): (&Vec<u8>, &VecDeque<Held>)| queue.iter().map(|v| cost(key, v.len())).sum::<u64>();
        let queues: u64 = held.queues.iter().map(queued).sum();
        let waits: u64 = held.waiters.values().flat_map(|w| &w.keys).map(|k| cost(k, k.len())).sum();
        let (counted, found) = (self.budget.held(), values + queues + waits);
        if counted != found {
            return Err(AuditError::Miscounted { counted, held: found });
        }
        match held.queues.iter().find(|(_, queue)| queue.is_empty()) {
            Some((key, _)) => Err(AuditError::EmptyQueue(key.clone())),
            None => Ok(()),
        }
    }

    /// Waits for keys. Returns `None` if all exist already.
    pub(super) fn wait(&self, mut keys: Vec<Held>) -> io::Result<Option<Wait<'_>>> {
        let mut held = self.lock();
        keys.sort_unstable_by(|a, b| a.cmp(b));
        keys.dedup_by(|a, b| **a == **b);
        keys.retain(|key| !held.holds(key));
        if keys.is_empty() {
            return Ok(None);
        }
        for key in &mut keys {
            // The name is kept twice.
            key.grow(key.len() as u64)?;
        }
        let (id, wake) = (held.next, Arc::new(Notify::new()));
        held.next += 1;
        for key in &keys {
            held.awaited.entry(key.to_vec()).or_default().push(id);
        }
        held.waiters.insert(id, Waiter { missing: keys.len(), keys, wake: wake.clone() });
        Ok(Some(Wait { shared: self, id, wake }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use everstep_wire::limits::STORE_BYTES_MAX;

    impl Shared {
        fn key(&self, key: &[u8]) -> Held {
            Held::new(key.to_vec(), self.reserve(cost(key, 0)).unwrap())
        }

        fn value(&self, bytes: usize) -> Held {
            Held::new(vec![1; bytes], self.reserve(bytes as u64).unwrap())
        }
    }

    #[test]
    fn all_that_is_kept_is_counted_and_counted_off() {
        let shared = Shared::default();
        let (key, value) = (|name: &[u8]| shared.key(name), |bytes| shared.value(bytes));
        shared.set(key(b"k"), value(100));
        shared.set(key(b"k"), value(10));
        assert_eq!(shared.budget.held(), 11 + ENTRY);
        shared.append(key(b"k"), value(3)).unwrap();
        shared.append(key(b"new"), value(3)).unwrap();
        shared.push(key(b"q"), value(50));
        shared.push(key(b"q"), value(50));
        assert_eq!(shared.pop(b"q").map(|v| v.len()), Some(50));
        shared.push(key(b"empty"), value(5));
        assert_eq!(shared.pop(b"empty").map(|v| v.len()), Some(5));
        assert_eq!((shared.audit(), shared.pop(b"empty").is_none(), shared.count()), (Ok(()), true, 3));
        drop(shared.reserve(1000).unwrap());
        let wait = shared.wait(vec![key(b"x"), key(b"x"), key(b"k")]).unwrap();
        assert_eq!(shared.audit(), Ok(()));
        drop(wait);
        let names = shared.names().unwrap();
        assert_eq!(names.0, [&b"k"[..], b"new", b"q"]);
        assert!(shared.audit().is_err());
        drop(names);
        assert!(shared.delete(b"k") && shared.delete(b"q") && !shared.delete(b"q") && shared.delete(b"new"));
        assert_eq!(shared.budget.held(), 0);
        assert!(shared.lock().awaited.is_empty() && shared.lock().waiters.is_empty());
    }

    #[test]
    fn what_is_being_sent_is_counted_once_until_it_has_been_sent() {
        let shared = Shared::default();
        shared.set(shared.key(b"k"), shared.value(100));
        let sending = [shared.get(b"k").unwrap(), shared.get(b"k").unwrap()];
        assert_eq!(shared.budget.held(), 101 + ENTRY);
        shared.append(shared.key(b"k"), shared.value(5)).unwrap();
        assert_eq!((sending[0].len(), shared.get(b"k").unwrap().len()), (100, 105));
        shared.delete(b"k");
        assert_eq!(shared.budget.held(), 101 + ENTRY);
        drop(sending);
        assert_eq!(shared.budget.held(), 0);
    }

    #[test]
    fn a_value_that_grows_has_the_limit_of_one_that_is_set() {
        let shared = Shared::default();
        shared.set(shared.key(b"k"), shared.value(STORE_VALUE_BYTES_MAX as usize - 1));
        shared.append(shared.key(b"k"), shared.value(1)).unwrap();
        assert!(shared.append(shared.key(b"k"), shared.value(1)).unwrap_err().to_string().contains("64 MiB"));
        assert_eq!(shared.audit(), Ok(()));
    }

    #[test]
    fn more_than_the_limit_is_refused_and_changes_nothing() {
        let shared = Shared::default();
        shared.set(shared.key(b"a"), shared.value(1));
        let (key, long) = (|| shared.key(b"a"), Held::new(vec![1; 300], shared.reserve(0).unwrap()));
        let most = shared.reserve(STORE_BYTES_MAX - shared.budget.held() - 200).unwrap();
        assert!(shared.append(key(), long).is_err() && shared.reserve(300).is_err());
        let waited = Held::new(vec![b'w'; 300], shared.reserve(0).unwrap());
        assert!(shared.wait(vec![waited]).is_err());
        assert_eq!(&**shared.get(b"a").unwrap(), [1]);
        drop(most);
        shared.set(key(), shared.value(300));
        assert_eq!(shared.audit(), Ok(()));
    }

    #[tokio::test]
    async fn a_wait_ends_with_its_last_key_and_others_do_not_wake_it() {
        let shared = Shared::default();
        let wait = shared.wait(vec![shared.key(b"a"), shared.key(b"b")]).unwrap().unwrap();
        for i in 0..1000u32 {
            shared.set(shared.key(&i.to_le_bytes()), shared.value(0));
        }
        shared.set(shared.key(b"a"), shared.value(0));
        let early = tokio::time::timeout(std::time::Duration::ZERO, wait.wake.notified()).await;
        assert!(early.is_err());
        shared.add(shared.key(b"b"), 1).unwrap();
        wait.wake.notified().await;
    }
}

//! Samples for the detector: host, network, cards and GPUs, once a second for the life of the
//! agent, by a thread of their own. The thread also keeps a ring of the last minute at 100 Hz,
//! which is sent only on request.

use super::budget::{Pace, spent};
use super::ethtool::{Card, Counted};
use super::host::Host;
use super::net::{self, bytes, interfaces};
use super::nvml::Load;
use super::table::again;
use crate::agent::input::{Input, Samples};
use crate::paths::unix_millis;
use everstep_detector::catalogue::number;
use everstep_detector::counter::Counter;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Time between samples.
const EVERY: Duration = Duration::from_secs(1);
/// Capacity of the ring: a minute, if the machine is fast enough ([`Pace`]).
const LOOKS: usize = 6000;

/// The network traffic of the last minute: milliseconds since 1970, bytes received and sent so far.
pub type Ring = Arc<Mutex<VecDeque<(u64, u64, u64)>>>;

#[derive(Default)]
struct Rates(BTreeMap<&'static str, Counter>);

impl Rates {
    fn of(&mut self, name: &'static str, at_ms: u64, value: Option<u64>, scale: f32, to: &mut Samples) {
        let rate = value.and_then(|value| self.0.entry(name).or_default().read(at_ms, value));
        if let Some((metric, rate)) = number(name).zip(rate) {
            to.push((metric as u8, rate * scale));
        }
    }
}

/// Returns the machine's kind. Machines with the same processor and the same GPU can be compared,
/// regardless of how many they have: a machine that lacks one must be found.
fn kind(cpuinfo: &str, gpu: Option<&str>) -> String {
    let model = cpuinfo.lines().find(|l| l.starts_with("model name") || l.starts_with("CPU part"));
    let model = model.and_then(|l| l.split_once(':')).map_or("", |(_, model)| model.trim());
    format!("{model}, {}", gpu.unwrap_or("no GPU"))
}

/// All sources of this machine.
struct Sources {
    host: Host,
    net: net::Source,
    cards: Vec<Card>,
    gpus: Option<Load>,
    rates: Rates,
}

impl Sources {
    fn open(library: Option<PathBuf>) -> Sources {
        let table = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
        Sources {
            host: Host::open(),
            net: net::Source::open(),
            cards: interfaces(&table).iter().filter_map(|name| Card::open(name)).collect(),
            gpus: library.and_then(|library| Load::open(&library)),
            rates: Rates::default(),
        }
    }

    fn sample(&mut self, at: u64, received: u64, sent: u64) -> Samples {
        let mut all = Samples::new();
        let net = self.net.now();
        let cards = self.cards.iter().filter_map(Card::counted).reduce(|a, b| Counted {
            pauses: a.pauses.wrapping_add(b.pauses),
            marked: a.marked.wrapping_add(b.marked),
            physical: a.physical.wrapping_add(b.physical),
        });
        let rates = &mut self.rates;
        rates.of("cpu", at, self.host.cpu_us(), 1e-6, &mut all);
        rates.of("disk", at, self.host.disk(), 1.0, &mut all);
        rates.of("net-received", at, Some(received), 1.0, &mut all);
        rates.of("net-sent", at, Some(sent), 1.0, &mut all);
        rates.of("net-retransmits", at, net.retransmits, 1.0, &mut all);
        rates.of("rdma-received", at, net.rdma.map(|r| r.0), 1.0, &mut all);
        rates.of("rdma-sent", at, net.rdma.map(|r| r.1), 1.0, &mut all);
        rates.of("pfc", at, cards.map(|c| c.pauses), 1.0, &mut all);
        rates.of("ecn", at, cards.map(|c| c.marked), 1.0, &mut all);
        rates.of("optics", at, cards.map(|c| c.physical), 1.0, &mut all);
        let mut level = |name: &str, value: Option<f32>| {
            if let Some((metric, value)) = number(name).zip(value) {
                all.push((metric as u8, value));
            }
        };
        level("memory", self.host.memory().map(|b| b as f32));
        level("net-queue", net.queue.map(|b| b as f32));
        for (name, value) in self.gpus.as_ref().map(Load::now).unwrap_or_default() {
            level(name, Some(value));
        }
        all
    }
}

/// Samples until the receiver is gone.
pub fn follow(library: Option<PathBuf>, ring: Ring, inbox: mpsc::UnboundedSender<Input>) {
    let work = move || {
        let mut sources = Sources::open(library);
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kind: Arc<str> = kind(&cpuinfo, sources.gpus.as_ref().and_then(Load::name).as_deref()).into();
        // Kept open, because it is read a hundred times a second.
        let table = File::open("/proc/self/net/dev").ok();
        let mut text = vec![0u8; 16 << 10];
        let mut pace = Pace::default();
        let (mut next, mut second) = (Instant::now(), Instant::now());
        let (mut looks, mut began) = (0, spent());
        while !inbox.is_closed() {
            let at = unix_millis();
            let (received, sent) = table.as_ref().map_or((0, 0), |table| bytes(again(table, &mut text)));
            sources.net.look();
            looks += 1;
            if let Ok(mut ring) = ring.lock() {
                ring.push_back((at, received, sent));
                let surplus = ring.len().saturating_sub(LOOKS);
                ring.drain(..surplus);
            }
            if Instant::now() >= second {
                second += EVERY;
                let of_looks = spent();
                let samples = sources.sample(at, received, sent);
                let _ = inbox.send(Input::Sampled(at, Arc::clone(&kind), samples));
                if Instant::now() > second {
                    // The machine was busy; skip what was missed.
                    second = Instant::now() + EVERY;
                }
                let now = spent();
                pace.learn(looks, of_looks.saturating_sub(began), now.saturating_sub(of_looks));
                (looks, began) = (0, now);
            }
            next = (next + pace.between()).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        }
    };
    let _ = std::thread::Builder::new().name("everstep-sample".into()).spawn(work);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_of_one_kind_however_many_processors_they_have_left() {
        let one = "processor\t: 0\nmodel name\t: Xeon 8480\n";
        let two = format!("{one}\nprocessor\t: 1\nmodel name\t: Xeon 8480\n");
        assert_eq!(kind(one, Some("H200")), kind(&two, Some("H200")));
        assert_eq!(kind(one, None), "Xeon 8480, no GPU");
        assert_ne!(kind(one, Some("H200")), kind(one, Some("H100")));
        assert_ne!(kind("processor: 0\nCPU part : 0xd4f\n", None), kind("CPU part : 0xd0c", None));
        assert_eq!(kind("", None), ", no GPU");
    }
}

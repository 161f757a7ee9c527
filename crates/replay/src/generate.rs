//! Failures generated from a seed. Each node has its own random stream.

use super::failures::{DAY, Failure, Failures, HOUR, Kind};
use everstep_rng::Rng;

/// How long a repair takes.
#[derive(Clone, Debug, PartialEq)]
pub enum Repair {
    /// Uniform between these two, in microseconds.
    Between(u64, u64),
    /// Exponential with this mean.
    Exponential(u64),
    /// Log-normal with this median and mean, so that a few repairs take very long.
    LogNormal(u64, u64),
}

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    /// Unicron's trace-a: 16 nodes, 8 weeks, 10 node failures and 33 others, repairs of 1 to 7 days
    /// (section 7.5).
    TraceA,
    /// Unicron's trace-b: 20 times the failure rate for 7 days. The paper gives no repair times;
    /// the 4 to 20 hours are our choice.
    TraceB,
    /// Every node fails independently, except for bursts.
    Renewal(Renewal),
    /// Blocks of days drawn at random from a real trace.
    Bootstrap {
        /// The real trace.
        of: Failures,
        /// The length of the result, in microseconds.
        length: u64,
        /// The length of one block, in microseconds.
        block: u64,
    },
}

/// Nodes that fail independently, or together with their neighbours.
#[derive(Clone, Debug, PartialEq)]
pub struct Renewal {
    /// The number of nodes.
    pub nodes: u32,
    /// The length in microseconds.
    pub length: u64,
    /// The mean time to failure of a node, in microseconds.
    pub mtbf: u64,
    /// The Weibull shape of the times between failures: 1 is exponential, less is bursty.
    pub shape: f64,
    /// Failures of processes and transient failures, per node failure.
    pub others: f64,
    /// How long repairs take.
    pub repair: Repair,
    /// The share of node failures that hit the whole domain.
    pub burst: f64,
    /// The number of nodes in a domain, such as a switch or a rack.
    pub domain: u32,
    /// The share of nodes that fail more often, and by what factor.
    pub lemons: (f64, f64),
}

impl Repair {
    fn draw(&self, rng: &mut Rng) -> u64 {
        let drawn = match self {
            Repair::Between(least, most) => rng.range(*least, *most + 1),
            Repair::Exponential(mean) => (-libm::log(rng.open()) * *mean as f64) as u64,
            Repair::LogNormal(median, mean) => {
                let sigma = libm::sqrt(2.0 * libm::log(*mean as f64 / *median as f64));
                (*median as f64 * libm::exp(sigma * rng.normal())) as u64
            }
        };
        drawn.max(1)
    }
}

/// Generates the failures of this seed.
#[must_use]
pub fn generate(recipe: &Recipe, seed: u64) -> Failures {
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_97f4_a7c1));
    match recipe {
        Recipe::TraceA => {
            let drawn = |rng: &mut Rng, length: u64| {
                let mut all: Vec<(u64, bool)> = (0..43).map(|n| (rng.range(0, length), n < 10)).collect();
                all.sort_unstable();
                all
            };
            let at = drawn(&mut rng, 56 * DAY);
            placed(16, 56 * DAY, at, &Repair::Between(DAY, 7 * DAY), &mut rng)
        }
        Recipe::TraceB => {
            // 20 times the rates of trace-a.
            let mut all = Vec::new();
            for (count, node) in [(10.0, true), (33.0, false)] {
                let mean = 56.0 * DAY as f64 / (20.0 * count);
                let mut at = 0.0;
                loop {
                    at += -libm::log(rng.open()) * mean;
                    if at >= (7 * DAY) as f64 {
                        break;
                    }
                    all.push((at as u64, node));
                }
            }
            all.sort_unstable();
            placed(16, 7 * DAY, all, &Repair::Between(4 * HOUR, 20 * HOUR), &mut rng)
        }
        Recipe::Renewal(of) => renewal(of, seed),
        Recipe::Bootstrap { of, length, block } => bootstrap(of, *length, *block, &mut rng),
    }
}

/// Assigns each failure time to a node drawn from those that are up.
fn placed(nodes: u32, length: u64, times: Vec<(u64, bool)>, repair: &Repair, rng: &mut Rng) -> Failures {
    let mut back = vec![0u64; nodes as usize];
    let mut list = Vec::new();
    for (at, node) in times {
        let up: Vec<u32> = (0..nodes).filter(|n| back[*n as usize] <= at).collect();
        let Some(victim) = rng.pick(&up).copied() else { continue };
        let kind = match (node, rng.percent(50)) {
            (true, _) => Kind::Node,
            (_, true) => Kind::Process,
            _ => Kind::Transient,
        };
        let repair = if node { repair.draw(rng) } else { 0 };
        back[victim as usize] = at + repair.max(u64::from(node));
        list.push(Failure { at, node: victim, kind, repair });
    }
    Failures { nodes, length, list }
}

fn renewal(of: &Renewal, seed: u64) -> Failures {
    let mut candidates = Vec::new();
    let (share, times) = of.lemons;
    // Scaled so that the mean over all nodes stays as requested.
    let usual = 1.0 / (1.0 - share + share * times);
    let gamma = libm::tgamma(1.0 + 1.0 / of.shape);
    for node in 0..of.nodes {
        let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ u64::from(node) << 20);
        let rate = if rng.open() <= share { usual * times } else { usual };
        let mean = of.mtbf as f64 / (1.0 + of.others) / rate;
        let mut at = 0.0;
        loop {
            at += mean / gamma * libm::pow(-libm::log(rng.open()), 1.0 / of.shape);
            if at >= of.length as f64 {
                break;
            }
            let kind = match rng.open() * (1.0 + of.others) {
                x if x <= 1.0 => Kind::Node,
                _ if rng.percent(50) => Kind::Process,
                _ => Kind::Transient,
            };
            let repair = if kind == Kind::Node { of.repair.draw(&mut rng) } else { 0 };
            let burst = kind == Kind::Node && rng.open() <= of.burst;
            candidates.push((Failure { at: at as u64, node, kind, repair }, burst));
            at += repair as f64;
        }
    }
    candidates.sort_by_key(|(f, _)| (f.at, f.node));
    let mut back = vec![0u64; of.nodes as usize];
    let mut list = Vec::new();
    let mut others = Rng::new(seed ^ 0x5bd1_e995);
    for (failure, burst) in candidates {
        let first = failure.node / of.domain.max(1) * of.domain.max(1);
        let hit = if burst { first..(first + of.domain).min(of.nodes) } else { failure.node..failure.node + 1 };
        for node in hit.filter(|n| failure.at >= back[*n as usize]).collect::<Vec<_>>() {
            let repair = match failure.kind {
                Kind::Node if node != failure.node => of.repair.draw(&mut others),
                _ => failure.repair,
            };
            back[node as usize] = failure.at + repair;
            list.push(Failure { node, repair, ..failure.clone() });
        }
    }
    Failures { nodes: of.nodes, length: of.length, list }
}

/// A lead-in before the beginning, so that long repairs are under way from the start.
const BEFORE: u64 = 120 * DAY;

fn bootstrap(of: &Failures, length: u64, block: u64, rng: &mut Rng) -> Failures {
    let block = block.clamp(1, of.length);
    let mut candidates = Vec::new();
    let mut begins = 0u64;
    while begins < length + BEFORE {
        // Blocks wrap around the end, so that every day is equally likely.
        let from = rng.range(0, of.length);
        for f in &of.list {
            let into = (f.at + of.length - from) % of.length;
            if into < block && begins + into < length + BEFORE {
                candidates.push(Failure { at: begins + into, ..f.clone() });
            }
        }
        begins += block;
    }
    candidates.sort_by_key(|f| (f.at, f.node));
    let mut back = vec![0u64; of.nodes as usize];
    let mut list = Vec::new();
    for f in candidates {
        let known = &mut back[f.node as usize];
        if f.at < *known {
            continue;
        }
        *known = f.at + f.repair;
        if f.at >= BEFORE {
            list.push(Failure { at: f.at - BEFORE, ..f });
        } else if f.at + f.repair > BEFORE {
            list.push(Failure { at: 0, repair: f.at + f.repair - BEFORE, ..f });
        }
    }
    list.sort_by_key(|f| (f.at, f.node));
    Failures { nodes: of.nodes, length, list }
}

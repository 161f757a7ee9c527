//! What a network card counts besides bytes, as `ethtool -S` shows it: pauses sent (PFC),
//! congestion marks (ECN), and errors corrected by its optics. Names are the drivers' own (mlx5,
//! bnxt, ice, ENA).
//!
//! Source: Linux, include/uapi/linux/ethtool.h (ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS,
//! ETHTOOL_GSTATS), SIOCETHTOOL.

use super::answer::long;
use rustix::fd::{AsFd, OwnedFd};
use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::{AddressFamily, SocketType, socket};

const SIOCETHTOOL: Opcode = 0x8946;
const GET_STRINGS: u32 = 0x1b;
const GET_STATS: u32 = 0x1d;
const SET_INFO: u32 = 0x37;
const STATS: u32 = 1;
/// Length of a counter's name in bytes.
const NAME: usize = 32;
/// Most counters believed: cards have hundreds.
const MOST: usize = 16_384;

/// `struct ifreq`: the interface's name and the address of the request.
#[repr(C)]
struct Request {
    name: [u8; 16],
    data: *mut u8,
    rest: [u8; 16],
}

/// A card whose counters are known by name.
pub struct Card {
    socket: OwnedFd,
    interface: String,
    names: Vec<String>,
}

/// Sums of the counters that matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Pauses sent.
    pub pauses: u64,
    /// Packets marked for congestion.
    pub marked: u64,
    /// Errors of the physical layer.
    pub physical: u64,
}

fn ask(socket: &OwnedFd, interface: &str, request: &mut [u8]) -> Option<()> {
    let mut name = [0u8; 16];
    name.get_mut(..interface.len().min(15))?.copy_from_slice(interface.as_bytes().get(..interface.len().min(15))?);
    let mut of = Request { name, data: request.as_mut_ptr(), rest: [0; 16] };
    // SAFETY: SIOCETHTOOL takes an ifreq whose data points at a request that the kernel reads and
    // fills; `request` is as long as its own header says (see the callers) and outlives the call.
    unsafe { ioctl(socket.as_fd(), Updater::<SIOCETHTOOL, Request>::new(&mut of)).ok() }
}

impl Card {
    /// Opens this interface. Returns `None` if it has no counters.
    #[must_use]
    pub fn open(interface: &str) -> Option<Card> {
        let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
        // cmd, reserved, mask of sets (64 bits), then their lengths.
        let mut info = [0u8; 24];
        info[..4].copy_from_slice(&SET_INFO.to_ne_bytes());
        info[8..16].copy_from_slice(&(1u64 << STATS).to_ne_bytes());
        ask(&socket, interface, &mut info)?;
        let many = long(&info, 16)? as usize;
        if many == 0 || many > MOST {
            return None;
        }
        // cmd, set, length, names.
        let mut strings = vec![0u8; 12 + many * NAME];
        strings[..4].copy_from_slice(&GET_STRINGS.to_ne_bytes());
        strings[4..8].copy_from_slice(&STATS.to_ne_bytes());
        strings[8..12].copy_from_slice(&u32::try_from(many).ok()?.to_ne_bytes());
        ask(&socket, interface, &mut strings)?;
        let name = |bytes: &[u8]| {
            let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
        };
        let names = strings.get(12..)?.chunks(NAME).map(name).collect();
        Some(Card { socket, interface: interface.to_owned(), names })
    }

    /// Returns the current values of all counters, in the order of their names.
    fn values(&self) -> Option<Vec<u64>> {
        // cmd, length, values.
        let mut stats = vec![0u8; 8 + self.names.len() * 8];
        stats[..4].copy_from_slice(&GET_STATS.to_ne_bytes());
        stats[4..8].copy_from_slice(&u32::try_from(self.names.len()).ok()?.to_ne_bytes());
        ask(&self.socket, &self.interface, &mut stats)?;
        let value = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_ne_bytes);
        stats.get(8..)?.chunks(8).map(value).collect()
    }

    /// Returns the sums of the counters that matter.
    #[must_use]
    pub fn counted(&self) -> Option<Counted> {
        Some(counted(&self.names, &self.values()?))
    }
}

fn counted(names: &[String], values: &[u64]) -> Counted {
    let mut all = Counted::default();
    for (name, value) in names.iter().zip(values) {
        let has = |words: &[&str]| words.iter().all(|w| name.contains(w));
        // Pauses sent to others, counted by priority: tx_prio3_pause, tx_pfc_frames_priority3,
        // priority_3_xoff_tx. Durations are not counts.
        let sent = name.starts_with("tx_") || name.ends_with("_tx");
        let pause = has(&["pause"]) || has(&["pfc"]) || has(&["xoff"]);
        if sent && pause && !has(&["duration"]) && !has(&["transition"]) {
            all.pauses = all.pauses.wrapping_add(*value);
        } else if has(&["ecn_mark"]) || has(&["cnp"]) {
            all.marked = all.marked.wrapping_add(*value);
        } else if has(&["symbol_err"])
            || has(&["corrected_bits"])
            || has(&["crc_err"])
            || has(&["fec"]) && has(&["err"])
        {
            all.physical = all.physical.wrapping_add(*value);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_known_by_their_drivers_names() {
        let of = |all: &[(&str, u64)]| {
            let names: Vec<String> = all.iter().map(|(n, _)| (*n).to_owned()).collect();
            counted(&names, &all.iter().map(|(_, v)| *v).collect::<Vec<_>>())
        };
        let mlx5 = [
            ("rx_bytes", 9),
            ("tx_prio3_pause", 4),
            ("rx_prio3_pause", 50),
            ("tx_prio3_pause_duration", 70),
            ("rx_ecn_mark", 2),
            ("rx_symbol_err_phy", 1),
            ("rx_corrected_bits_phy", 6),
        ];
        assert_eq!(of(&mlx5), Counted { pauses: 4, marked: 2, physical: 7 });
        assert_eq!(of(&[("priority_3_xoff_tx.nic", 1), ("tx_pfc_frames_priority3", 2)]).pauses, 2);
    }

    #[test]
    fn interfaces_of_this_machine_answer_or_count_nothing() {
        assert!(Card::open("no-such-one").is_none());
        let table = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
        for name in super::super::net::interfaces(&table) {
            if let Some(card) = Card::open(&name) {
                assert_eq!(card.values().map(|v| v.len()), Some(card.names.len()), "{name}");
            }
        }
    }
}

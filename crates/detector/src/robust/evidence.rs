//! Counts in how many recent blocks each machine deviated. The counts are updated as blocks arrive:
//! a query costs nothing, and a machine that does not deviate next to nothing.

use super::Settings;

/// Seconds per block.
pub const BLOCK: usize = 5;

/// Size and direction of a deviation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Slightly above the peers.
    FaintMore,
    /// Slightly below.
    FaintLess,
    /// Clearly above.
    ClearMore,
    /// Clearly below.
    ClearLess,
    /// As good as dead.
    Dead,
}

/// All signs.
pub const SIGNS: [Sign; 5] = [Sign::FaintMore, Sign::FaintLess, Sign::ClearMore, Sign::ClearLess, Sign::Dead];

/// Number of recent blocks examined for each sign, and how many of them must show it.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    blocks: [u8; 5],
    /// Blocks that must show a sign.
    pub enough: [u8; 5],
    /// The same for a machine next to one that is certain.
    pub beside: [u8; 5],
    /// The same if a single metric made that one certain.
    pub beside_in_one: [u8; 5],
    /// One byte per sign: what must be added to `enough` blocks to reach 128.
    lacking: u64,
}

/// Returns the number of blocks in `seconds`.
pub fn blocks(seconds: usize) -> u8 {
    seconds.div_ceil(BLOCK).clamp(1, 63) as u8
}

impl Spans {
    /// Returns the spans for these settings.
    pub fn of(s: &Settings) -> Spans {
        let (long, short, dead) = (blocks(s.one_family_s), blocks(s.two_families_s), blocks(s.dead_s));
        let blocks = [long, long, short, short, dead];
        let share = |of: f32| blocks.map(|n| (of * f32::from(n)).ceil() as u8);
        let enough = share(s.share);
        let lacking =
            (0u64..).zip(enough).map(|(sign, enough)| u64::from(128u8.saturating_sub(enough)) << (8 * sign)).sum();
        let (beside, beside_in_one) = (share(s.accomplice), share((2.0 * s.accomplice).min(s.share)));
        Spans { blocks, enough, beside, beside_in_one, lacking }
    }
}

/// Blocks to remember.
const KEPT: usize = 64;

/// Expands five flags to the five bytes of a number, so that all counts are updated at once.
const BYTES: [u64; 32] = {
    let mut all = [0; 32];
    let mut flags = 0;
    while flags < 32 {
        let mut sign = 0;
        while sign < 5 {
            all[flags] |= (flags as u64 >> sign & 1) << (8 * sign);
            sign += 1;
        }
        flags += 1;
    }
    all
};

/// Machines whose flags are checked together; usually none of them is set.
const TOGETHER: usize = 32;

/// The signs of all machines in one metric.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// By block (a ring), then by machine: one bit per sign, the first in the lowest bit.
    flags: Vec<u8>,
    /// By machine, one byte per sign: the number of blocks in its span that show it.
    many: Vec<u64>,
    /// Machines that show any sign for long enough; rarely any.
    pub shown: Vec<u32>,
}

impl Evidence {
    /// Creates a record without any evidence.
    pub fn new(machines: usize) -> Evidence {
        Evidence { flags: vec![0; KEPT * machines], many: vec![0; machines], shown: Vec::new() }
    }

    /// Adds block `number`; `flags` has one entry per machine.
    pub fn push(&mut self, spans: &Spans, number: u32, flags: &[u8]) {
        let (machines, at) = (self.many.len(), number as usize % KEPT);
        let row = |at: usize| at * machines..(at + 1) * machines;
        let then = |sign: Sign| row((at + KEPT - usize::from(spans.blocks[sign as usize])) % KEPT);
        // The blocks that leave each span.
        let (long, short, dead) = (then(Sign::FaintMore), then(Sign::ClearMore), then(Sign::Dead));
        let (long, short, dead) = (&self.flags[long], &self.flags[short], &self.flags[dead]);
        let left = |flags: u8, mask: u64| BYTES[usize::from(flags & 31)] & mask;
        for (from, new) in (0..).step_by(TOGETHER).zip(flags.chunks(TOGETHER)) {
            let these = from..from + new.len();
            let any = |flags: &[u8]| flags.iter().fold(0, |any, of| any | of);
            if any(new) | any(&long[these.clone()]) | any(&short[these.clone()]) | any(&dead[these.clone()]) == 0 {
                continue;
            }
            for (m, new) in these.zip(new) {
                let leave = left(long[m], 0xffff) | left(short[m], 0xffff_0000) | left(dead[m], 0xff_0000_0000);
                self.many[m] = self.many[m] + BYTES[usize::from(new & 31)] - leave;
            }
        }
        self.flags[row(at)].copy_from_slice(flags);
        self.shown.clear();
        // Tests all five counts at once.
        let shows_any = |many: u64| (many + spans.lacking) & 0x80_8080_8080 != 0;
        self.shown.extend((0..).zip(&self.many).filter(|(_, many)| shows_any(**many)).map(|(m, _)| m));
    }

    /// Discards what a machine has shown.
    pub fn forget(&mut self, machine: usize) {
        // Without counts, all its flags have already left their spans.
        if self.many[machine] != 0 {
            let machines = self.many.len();
            self.flags.iter_mut().skip(machine).step_by(machines).for_each(|flags| *flags = 0);
            self.many[machine] = 0;
            self.shown.retain(|m| *m as usize != machine);
        }
    }

    /// Returns whether a machine shows this sign in enough blocks, as given by `of`.
    pub fn shows(&self, machine: usize, sign: Sign, of: &[u8; 5]) -> bool {
        self.many(machine, sign) >= of[sign as usize]
    }

    /// Returns the number of blocks in the sign's span that show it.
    fn many(&self, machine: usize, sign: Sign) -> u8 {
        (self.many[machine] >> (8 * sign as u64)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_are_those_of_the_last_blocks(all in prop::collection::vec(any::<bool>(), 0..200), seconds in 1usize..320, who in 0usize..70, forgot in 0usize..250) {
            let settings = Settings { one_family_s: seconds, ..Settings::default() };
            let (spans, mut of) = (Spans::of(&settings), Evidence::new(70));
            let all_of_them: Vec<u32> = (0..70).collect();
            for (at, is) in (7u32..).zip(&all) {
                let mut flags = [0; 70];
                flags[who] = if *is { 0b11101 } else { 0b01010 };
                of.push(&spans, at, &flags);
                if at as usize == 7 + forgot {
                    of.forget(who);
                }
            }
            let since = if forgot < all.len() { &all[forgot + 1..] } else { &all };
            let last = |n: u8, what: bool| since.iter().rev().take(n.into()).filter(|is| **is == what).count();
            prop_assert_eq!(usize::from(of.many(who, Sign::FaintMore)), last(blocks(settings.one_family_s), true));
            prop_assert_eq!(usize::from(of.many(who, Sign::Dead)), last(blocks(settings.dead_s), true));
            prop_assert_eq!(usize::from(of.many(who, Sign::ClearLess)), since.len().min(blocks(settings.two_families_s).into()));
            let shows = SIGNS.iter().any(|sign| of.shows(who, *sign, &spans.enough));
            prop_assert_eq!(&of.shown, if shows { &all_of_them[who..=who] } else { &[][..] });
            prop_assert!((0..70).filter(|m| *m != who).all(|m| of.many[m] == 0));
        }
    }
}

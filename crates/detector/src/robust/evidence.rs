//! In how many of the last blocks a metric of each machine was far off. Counted as it comes: to be asked costs nothing, and who is not far off next to
//! nothing.

use super::Settings;

/// Seconds of a block.
pub const BLOCK: usize = 5;

/// How far off, and which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A little: more, or less.
    FaintMore,
    /// See above.
    FaintLess,
    /// Clearly.
    ClearMore,
    /// See above.
    ClearLess,
    /// As good as dead.
    Dead,
}

/// All of them.
pub const SIGNS: [Sign; 5] = [Sign::FaintMore, Sign::FaintLess, Sign::ClearMore, Sign::ClearLess, Sign::Dead];

/// Blocks that are looked at, by sign; and how many of them must show it.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    blocks: [u8; 5],
    /// See above.
    pub enough: [u8; 5],
    /// The same for a machine beside one that is certain.
    pub beside: [u8; 5],
    /// And when a single metric tells of that one.
    pub beside_in_one: [u8; 5],
    /// By sign, a byte each: what with enough blocks makes 128.
    lacking: u64,
}

/// Blocks in so many seconds.
pub fn blocks(seconds: usize) -> u8 {
    seconds.div_ceil(BLOCK).clamp(1, 63) as u8
}

impl Spans {
    /// As the settings have it.
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

/// Blocks that are remembered.
const KEPT: usize = 64;

/// Five flags as five bytes of a number, so that all counts are added to at once.
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

/// Machines whose flags are looked at together: of most of them all are none.
const TOGETHER: usize = 32;

/// One metric of all machines.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// By block (a ring), then by machine: flags of the signs, the first the lowest.
    flags: Vec<u8>,
    /// By machine; by sign, a byte each: blocks of its span that show it.
    many: Vec<u64>,
    /// Machines that show any sign for long enough: hardly ever one.
    pub shown: Vec<u32>,
}

impl Evidence {
    /// None yet.
    pub fn new(machines: usize) -> Evidence {
        Evidence { flags: vec![0; KEPT * machines], many: vec![0; machines], shown: Vec::new() }
    }

    /// One more block, the one of this number; `flags` by machine.
    pub fn push(&mut self, spans: &Spans, number: u32, flags: &[u8]) {
        let (machines, at) = (self.many.len(), number as usize % KEPT);
        let row = |at: usize| at * machines..(at + 1) * machines;
        let then = |sign: Sign| row((at + KEPT - usize::from(spans.blocks[sign as usize])) % KEPT);
        // Of each span what leaves it.
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
        // All five are asked at once.
        let shows_any = |many: u64| (many + spans.lacking) & 0x80_8080_8080 != 0;
        self.shown.extend((0..).zip(&self.many).filter(|(_, many)| shows_any(**many)).map(|(m, _)| m));
    }

    /// Forgets what a machine has shown.
    pub fn forget(&mut self, machine: usize) {
        // What is not counted has left its span and does not leave it again.
        if self.many[machine] != 0 {
            let machines = self.many.len();
            self.flags.iter_mut().skip(machine).step_by(machines).for_each(|flags| *flags = 0);
            self.many[machine] = 0;
            self.shown.retain(|m| *m as usize != machine);
        }
    }

    /// Whether a machine shows this sign in so many blocks.
    pub fn shows(&self, machine: usize, sign: Sign, of: &[u8; 5]) -> bool {
        self.many(machine, sign) >= of[sign as usize]
    }

    /// Blocks of its span that show this sign.
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

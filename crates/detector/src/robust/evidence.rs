//! In how many of the last blocks a metric of a machine was far off. Counted as it comes: to be asked costs nothing.

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
        Spans { blocks, enough, beside: share(s.accomplice), lacking }
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

/// One metric of one machine.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    /// By block, flags of the signs; a ring.
    flags: [u8; KEPT],
    /// By sign, a byte each: blocks of its span that show it.
    many: u64,
}

impl Default for Evidence {
    fn default() -> Evidence {
        Evidence { flags: [0; KEPT], many: 0 }
    }
}

impl Evidence {
    /// One more block, the one of this number; `flags` by sign, the first the lowest.
    pub fn push(&mut self, spans: &Spans, number: u32, flags: u8) {
        let at = number as usize % KEPT;
        let left = |sign: Sign, mask: u64| {
            let then = (at + KEPT - usize::from(spans.blocks[sign as usize])) % KEPT;
            BYTES[usize::from(self.flags[then] & 31)] & mask
        };
        let leave =
            left(Sign::FaintMore, 0xffff) | left(Sign::ClearMore, 0xffff_0000) | left(Sign::Dead, 0xff_0000_0000);
        self.many = self.many + BYTES[usize::from(flags & 31)] - leave;
        self.flags[at] = flags & 31;
    }

    /// Whether it shows any sign for long enough: all five are asked at once.
    pub fn shows_any(&self, spans: &Spans) -> bool {
        (self.many + spans.lacking) & 0x80_8080_8080 != 0
    }

    /// Whether it shows this sign in so many blocks.
    pub fn shows(&self, sign: Sign, of: &[u8; 5]) -> bool {
        self.many(sign) >= of[sign as usize]
    }

    /// Blocks of its span that show this sign.
    fn many(&self, sign: Sign) -> u8 {
        (self.many >> (8 * sign as u64)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_are_those_of_the_last_blocks(all in prop::collection::vec(any::<bool>(), 0..200), seconds in 1usize..320) {
            let settings = Settings { one_family_s: seconds, ..Settings::default() };
            let (spans, mut of) = (Spans::of(&settings), Evidence::default());
            for (at, is) in (7u32..).zip(&all) {
                of.push(&spans, at, if *is { 0b11001 } else { 0b01010 });
            }
            let last = |n: u8| all.iter().rev().take(n.into()).filter(|is| **is).count();
            prop_assert_eq!(usize::from(of.many(Sign::FaintMore)), last(blocks(seconds)));
            prop_assert_eq!(usize::from(of.many(Sign::Dead)), last(blocks(settings.dead_s)));
            prop_assert_eq!(of.shows_any(&spans), SIGNS.iter().any(|sign| of.shows(*sign, &spans.enough)));
            prop_assert_eq!(of.many(Sign::ClearMore), 0);
            prop_assert_eq!(usize::from(of.many(Sign::ClearLess)), all.len().min(blocks(settings.two_families_s).into()));
        }
    }
}

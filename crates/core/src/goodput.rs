//! Goodput in its first form: new steps times step time, over the time that the ranks were held.
//!
//! Per generation: steps beyond the highest that any earlier generation had reached are new; they are
//! worth the generation's median step time on each of its ranks. The ranks are held from the start of
//! the generation to the start of the next one (or the end), also while nobody steps.

/// What is known of one generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// Start, in seconds.
    pub from: f64,
    /// Start of the next generation, end of the job, or now.
    pub to: f64,
    /// Ranks.
    pub ranks: u32,
    /// Highest step that all ranks have completed.
    pub step: u64,
    /// Step that was restored.
    pub restored: u64,
    /// Step times that were seen, in microseconds.
    pub step_micros: Vec<u64>,
}

/// Sums over the generations of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goodput {
    /// Ranks × seconds held.
    pub held: f64,
    /// Ranks × seconds of new steps.
    pub productive: f64,
    /// New steps.
    pub new_steps: u64,
    /// Steps that were computed again.
    pub repeated_steps: u64,
}

impl Goodput {
    /// Productive share of the held time, 0 to 1.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        if self.held > 0.0 { (self.productive / self.held).min(1.0) } else { 0.0 }
    }
}

/// Adds up a job's generations, in order.
#[must_use]
pub fn goodput(spans: &[Span]) -> Goodput {
    let mut total = Goodput::default();
    let mut reached = 0;
    for span in spans {
        let ranks = f64::from(span.ranks);
        let length = (span.to - span.from).max(0.0);
        let mut micros = span.step_micros.clone();
        micros.sort_unstable();
        let each = micros.get(micros.len() / 2).map_or(0.0, |m| *m as f64 / 1e6);
        let new = span.step.saturating_sub(reached.max(span.restored));
        total.held += length * ranks;
        // No generation is worth more than it has lasted.
        total.productive += (new as f64 * each).min(length) * ranks;
        total.new_steps += new;
        total.repeated_steps += span.step.min(reached).saturating_sub(span.restored);
        reached = reached.max(span.step);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_steps_and_waiting_are_not_productive() {
        let first = Span { from: 0.0, to: 20.0, ranks: 4, step: 100, restored: 0, step_micros: vec![100_000; 9] };
        let second = Span { from: 20.0, to: 40.0, ranks: 2, step: 150, restored: 90, step_micros: vec![200_000; 9] };
        let g = goodput(&[first, second]);
        assert_eq!((g.new_steps, g.repeated_steps), (150, 10));
        assert!((g.held - 120.0).abs() < 1e-9 && (g.productive - (40.0 + 20.0)).abs() < 1e-9, "{g:?}");
        assert!((g.ratio() - 0.5).abs() < 1e-9);
    }

    #[test]
    fn nothing_is_nothing() {
        assert_eq!(goodput(&[]).ratio(), 0.0);
    }
}

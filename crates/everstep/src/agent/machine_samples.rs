//! Sends the samples of this machine to the coordinator's detector.

use super::Driver;
use super::input::Samples;
use crate::detect::packing;
use everstep_checkpoint::step_board::Word;
use everstep_core::progress::RankProgress;
use everstep_wire::envelope::ToCoordinator;

impl Driver {
    /// Sends the samples of one second, completed with values from the workers' step boards.
    pub(super) fn sampled(&mut self, at: u64, kind: &str, mut samples: Samples) {
        let Some((link, crew)) = self.link.as_ref().zip(self.crew.as_ref()) else { return };
        let most = |of: &dyn Fn(&RankProgress) -> Option<f32>| self.progress.values().filter_map(of).reduce(f32::max);
        let own = most(&|p| Some(p.own_us? as f32 / 1e6));
        let share = most(&|p| Some(p.own_us? as f32 / p.step_us.filter(|us| *us > 0)? as f32));
        for (name, value) in [("step-own", own), ("step-share", share)] {
            samples.extend(everstep_detector::catalogue::number(name).zip(value).map(|(n, v)| (n as u8, v)));
        }
        let mut role = flate2::Crc::new();
        role.update(kind.as_bytes());
        crew.workers.values().for_each(|w| role.update(&w.board.get(Word::Role).to_le_bytes()));
        let new = if role.sum() == self.role { 0 } else { role.sum() };
        let _ = link.send(ToCoordinator::Samples { at, role: new, packed: packing::packed(&samples) });
        self.role = role.sum();
    }
}

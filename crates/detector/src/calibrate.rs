//! Calibrates the thresholds to a given rate of false alarms: they grow until the bound on that
//! rate, computed from normal data, meets the goal (conformal risk control, Angelopoulos et al.
//! 2022, section 2.1: with n days and losses of at most one, the mean with one more loss stays
//! below the goal).

use crate::robust::Settings;
use crate::{Detector, Series};

/// Factors on the thresholds to try, in ascending order.
const FACTORS: [f32; 12] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.7, 2.0, 2.4, 3.0, 4.0, 5.5, 8.0];

/// The result of a calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibrated {
    /// Settings for the robust detector.
    pub settings: Settings,
    /// Factor on the previous thresholds.
    pub factor: f32,
    /// Machine-days of normal data.
    pub days: f64,
    /// Number of series with an alarm, at these settings.
    pub alarms: usize,
    /// Upper bound on alarms per 1,000 machine-days.
    pub per_1000: f64,
}

/// Why thresholds cannot be calibrated.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// There is too little data for the goal.
    #[error(
        "{days:.1} machine-days of normal data cannot promise {per_1000} false alarms per 1,000: {needed:.0} are needed, or a goal of {reachable:.1}"
    )]
    TooLittle {
        /// Machine-days of data.
        days: f64,
        /// The goal.
        per_1000: f64,
        /// Machine-days that the goal takes.
        needed: f64,
        /// The goal that the data could promise.
        reachable: f64,
    },
    /// There are too many alarms at any threshold.
    #[error(
        "there are more than {per_1000} alarms per 1,000 machine-days whatever the thresholds: something is wrong in that data, or machines of different roles are compared"
    )]
    TooManyAlarms {
        /// The goal.
        per_1000: f64,
    },
}

/// Returns settings with at most `per_1000` false alarms per 1,000 machine-days. Nothing may be
/// wrong in any of the `normal` series.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrated(from: &Settings, normal: &[Series], per_1000: f64) -> Result<Calibrated, CalibrateError> {
    let days: f64 = normal.iter().map(|s| (s.machines() * s.seconds()) as f64 / 86_400.0).sum();
    let bound = |alarms: usize| (alarms as f64 + 1.0) / (days + 1.0) * 1000.0;
    if bound(0) > per_1000 {
        let needed = 1000.0 / per_1000 - 1.0;
        return Err(CalibrateError::TooLittle { days, per_1000, needed, reachable: bound(0) });
    }
    for factor in FACTORS {
        let settings = Settings { faint: from.faint * factor, clear: from.clear * factor, ..*from };
        let alarms = normal.iter().filter(|s| settings.first(s).is_some()).count();
        if bound(alarms) <= per_1000 {
            return Ok(Calibrated { settings, factor, days, alarms, per_1000: bound(alarms) });
        }
    }
    Err(CalibrateError::TooManyAlarms { per_1000 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;

    /// Machine 2 does slightly more for a while: enough for the default thresholds.
    fn series(times: f32) -> Series {
        let mut series = Series::new(vec![by_name("cpu").0], vec![0; 8], 900);
        for second in 0..900 {
            for (machine, value) in series.row_mut(0, second).iter_mut().enumerate() {
                let noise = ((second * 7919 + machine * 104_729) % 1009) as f32 / 1009.0 - 0.5;
                *value = 10.0 + noise + if machine == 2 && second > 400 { times } else { 0.0 };
            }
        }
        series
    }

    #[test]
    fn thresholds_grow_until_the_goal_is_kept() {
        let from = Settings::default();
        let quiet: Vec<Series> = (0..20).map(|_| series(0.0)).collect();
        let found = calibrated(&from, &quiet, 700.0).unwrap();
        assert_eq!((found.factor, found.alarms), (1.0, 0));
        let mut some = quiet.clone();
        some.extend((0..6).map(|_| series(0.6)));
        assert!(some.iter().filter(|s| from.first(s).is_some()).count() == 6);
        let found = calibrated(&from, &some, 500.0).unwrap();
        assert!(found.factor > 1.0 && found.per_1000 <= 500.0, "{found:?}");
        assert!(calibrated(&from, &quiet, 0.4).unwrap_err().to_string().contains("needed"));
    }
}

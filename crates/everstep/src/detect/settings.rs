//! The choice of a detector and its settings, as a file (`--detector FILE`, TOML).

use everstep_detector::Series;
use everstep_detector::alarms::{Alarm, minder, robust};
use everstep_detector::models::{Models, ModelsError};
use everstep_detector::robust::Settings;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The models that ship with the program: trained on generated fleets (`shipped_models`, an example
/// of `everstep-fleet`), for the metrics of any machine.
const DEFAULT: &str = include_str!("models.json");

/// The kinds of detector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Compares with the medians of a role.
    #[default]
    Robust,
    /// Minder's models.
    LstmVae,
    /// No detector.
    Off,
}

/// The file of settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct File {
    pub detector: Kind,
    /// Models for lstm-vae; by default, those that ship with the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<PathBuf>,
    /// Settings of robust.
    pub robust: Settings,
}

/// A detector that is ready to run.
#[derive(Clone, Debug)]
pub enum Ready {
    /// See [`Kind::Robust`].
    Robust(Settings),
    /// See [`Kind::LstmVae`].
    LstmVae(Box<Models>),
    /// See [`Kind::Off`].
    Off,
}

/// Settings that cannot be used, or models that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The file of settings is not TOML, or has an unknown field.
    #[error("{}: {}", path.display(), source.message())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    #[error("share, group, accomplice, dead and effect must be above 0 and at most 1")]
    Shares,
    #[error("faint and clear are numbers of standard deviations, above 0")]
    Deviations,
    #[error("per_doubling is from 0 to 1, and few at least 1 machine")]
    FewMachines,
    #[error("one_family_s, two_families_s, dead_s and known_s are from 5 to 315 seconds")]
    Times,
    #[error("{}: {source}", path.display())]
    Models { path: PathBuf, source: ModelsError },
    /// The models that ship with the program cannot be used.
    #[error(transparent)]
    ShippedModels(ModelsError),
}

impl File {
    /// Reads the file.
    ///
    /// # Errors
    /// Fails if the file cannot be read or has invalid settings.
    pub fn read(path: &Path) -> Result<File, SettingsError> {
        toml::from_str(&text(path)?).map_err(|e| SettingsError::Parse { path: path.to_owned(), source: Box::new(e) })
    }

    /// Checks the settings and loads the models.
    ///
    /// # Errors
    /// Fails if the models cannot be read, or if a time or share is out of range.
    pub fn ready(&self) -> Result<Ready, SettingsError> {
        let s = &self.robust;
        let shares = [s.share, s.group, s.accomplice, s.dead, s.effect];
        if shares.iter().any(|x| !(*x > 0.0 && *x <= 1.0)) {
            return Err(SettingsError::Shares);
        }
        if ![s.faint, s.clear].iter().all(|x| *x > 0.0 && x.is_finite()) {
            return Err(SettingsError::Deviations);
        }
        if !(0.0..=1.0).contains(&s.per_doubling) || s.few == 0 {
            return Err(SettingsError::FewMachines);
        }
        let times = [s.one_family_s, s.two_families_s, s.dead_s, s.known_s];
        if times.iter().any(|t| !(5..=315).contains(t)) {
            return Err(SettingsError::Times);
        }
        Ok(match self.detector {
            Kind::Robust => Ready::Robust(*s),
            Kind::Off => Ready::Off,
            Kind::LstmVae => Ready::LstmVae(Box::new(models(self.models.as_deref())?)),
        })
    }
}

fn text(path: &Path) -> Result<String, SettingsError> {
    crate::user_file::read(path).map_err(|source| SettingsError::Io { path: path.to_owned(), source })
}

/// Returns the models in a file, or those that ship with the program.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn models(path: Option<&Path>) -> Result<Models, SettingsError> {
    match path {
        None => Models::read(DEFAULT).map_err(SettingsError::ShippedModels),
        Some(path) => {
            Models::read(&text(path)?).map_err(|source| SettingsError::Models { path: path.to_owned(), source })
        }
    }
}

impl Ready {
    /// Returns all alarms of a series.
    #[must_use]
    pub fn alarms(&self, series: &Series) -> Vec<Alarm> {
        match self {
            Ready::Robust(settings) => robust(settings, series),
            Ready::LstmVae(models) => minder(models, series),
            Ready::Off => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ships_is_whole_and_settings_are_within_reason() {
        assert!(models(None).unwrap().general);
        let read = |text: &str| toml::from_str::<File>(text).unwrap();
        assert!(matches!(read("").ready(), Ok(Ready::Robust(_))));
        assert!(matches!(read("detector = \"lstm-vae\"").ready(), Ok(Ready::LstmVae(_))));
        assert!(read("[robust]\nshare = 0.0").ready().is_err());
        assert!(read("[robust]\none_family_s = 100000").ready().is_err());
        assert!(toml::from_str::<File>("[robust]\nshar = 0.5").is_err());
    }
}

//! Trained models as a file: one LSTM-VAE per metric, the limits its values are scaled by, the
//! order in which metrics are examined, and the settings of the test. A file that is incomplete or
//! of another version is rejected.
//!
//! ```text
//!  {"format": "everstep-models", "version": 1, "about": …, "models": [{metric, limits, parameters}], "order": […], "digest": "…"}
//! ```
//! Floats are written as their bits, so a file contains exactly what training produced. The digest
//! is the BLAKE3 hash of the contents with an empty digest.

use crate::lstm_vae::{Model, Training, WINDOW};
use crate::minder::{Continuity, Distance, Embedding, candidates};
use crate::prepare::{Limits, prepared};
use crate::{Detector, Metric, Series, Verdict};
use serde::{Deserialize, Serialize};

/// Name of the file format.
const FORMAT: &str = "everstep-models";
/// Version of the format that this program reads and writes.
const VERSION: u32 = 1;
/// Seconds between training windows; more would add little.
const APART: usize = 11;

/// The model of one metric.
#[derive(Clone, Debug)]
pub struct OfMetric {
    /// The metric it was trained on.
    pub metric: Metric,
    /// Limits by which its values are scaled.
    pub limits: Limits,
    /// The network.
    pub model: Model,
}

/// All models of a detector, and how to apply them.
#[derive(Clone, Debug)]
pub struct Models {
    /// What the models were trained on, for display.
    pub about: String,
    /// One model per metric.
    pub all: Vec<OfMetric>,
    /// Indices into `all`, the most informative metric first.
    pub order: Vec<usize>,
    /// The test that turns an outlier into a verdict.
    pub when: Continuity,
    /// Seconds between windows when detecting.
    pub stride: usize,
    /// For metrics from other machines, in other units: values are scaled by the limits of the
    /// series under examination, and a metric without a model uses one of its family.
    pub general: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    metric: Metric,
    /// The bits of the floats, as for all floats in the file.
    limits: [u32; 2],
    parameters: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: String,
    version: u32,
    about: String,
    models: Vec<Written>,
    order: Vec<usize>,
    threshold: u32,
    continuity_s: usize,
    stride: usize,
    general: bool,
    digest: String,
}

fn digest(of: &File) -> String {
    let text = serde_json::to_string(of).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// Returns the windows of one metric without missing samples.
fn windows(series: &Series, metric: usize, limits: Limits) -> Vec<Vec<f32>> {
    let (ready, machines) = (prepared(series, metric, limits), series.machines());
    let starts = (0..(series.seconds() + 1).saturating_sub(WINDOW)).step_by(APART);
    let window = |start: usize, machine: usize| -> Vec<f32> {
        (start..start + WINDOW).map(|second| ready[second * machines + machine]).collect()
    };
    let cut = starts.flat_map(|start| (0..machines).map(move |machine| (start, machine)));
    cut.map(|(start, machine)| window(start, machine)).filter(|w| w.iter().all(|v| v.is_finite())).collect()
}

/// Why no models can be trained.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// There are no series.
    #[error("there is nothing to train on")]
    Nothing,
    /// Every metric has too many gaps.
    #[error("no metric has {WINDOW} seconds without a gap: there is nothing to train on")]
    Gaps,
}

/// Why a models file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelsError {
    /// It is something else.
    #[error("not a models file: {0}")]
    NoModels(serde_json::Error),
    /// It is of another format.
    #[error("this is a file of {0}, not of models")]
    Format(String),
    /// Another version of the program has written it.
    #[error("its version is {0}, this program reads {VERSION}: train it again (everstep detect train)")]
    Version(u32),
    /// Parts of it are missing.
    #[error("the models file is incomplete: {0}")]
    Partial(serde_json::Error),
    /// It is not what was written.
    #[error("the models file was changed or damaged (its digest does not match): train it again")]
    Digest,
    /// A network does not have the shape of this version's.
    #[error("the model of {metric} has another number of parameters")]
    Parameters {
        /// Its metric.
        metric: String,
    },
    /// The order names models that are not there.
    #[error("the models file orders metrics that it does not contain")]
    Order,
}

impl Models {
    /// Trains models on normal data. Metrics without any samples get no model. With `from`,
    /// training continues from the models it has: a job's own history then needs few epochs.
    ///
    /// # Errors
    /// [`TrainError`]: there is nothing to train on.
    pub fn trained(
        normal: &[Series],
        how: &Training,
        from: Option<&Models>,
        about: &str,
    ) -> Result<Models, TrainError> {
        let metrics = &normal.first().ok_or(TrainError::Nothing)?.metrics;
        let mut all = Vec::new();
        for (at, metric) in metrics.iter().enumerate() {
            let known = from.and_then(|f| f.all.iter().find(|m| m.metric.name == metric.name));
            let values = || normal.iter().flat_map(|s| s.metric(at).iter().copied());
            if values().all(|v| !v.is_finite()) {
                continue;
            }
            let limits = known.map_or_else(|| Limits::of(values()), |k| k.limits);
            let cut: Vec<Vec<f32>> = normal.iter().flat_map(|s| windows(s, at, limits)).collect();
            if cut.is_empty() {
                continue;
            }
            let refs: Vec<&[f32]> = cut.iter().map(Vec::as_slice).collect();
            let model = match known {
                Some(known) => known.model.tuned(&refs, how),
                None => Model::trained(1, &refs, how),
            };
            all.push(OfMetric { metric: metric.clone(), limits, model });
        }
        if all.is_empty() {
            return Err(TrainError::Gaps);
        }
        let order = (0..all.len()).collect();
        let when = from.map_or(Continuity { threshold: 3.0, seconds: 240 }, |f| f.when);
        Ok(Models { about: about.into(), all, order, when, stride: WINDOW, general: false })
    }

    /// Returns the models as the text of a file.
    #[must_use]
    pub fn written(&self) -> String {
        let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect();
        let model = |m: &OfMetric| Written {
            metric: m.metric.clone(),
            limits: [m.limits.low.to_bits(), m.limits.high.to_bits()],
            parameters: bits(m.model.parameters()),
        };
        let mut file = File {
            format: FORMAT.into(),
            version: VERSION,
            about: self.about.clone(),
            models: self.all.iter().map(model).collect(),
            order: self.order.clone(),
            threshold: self.when.threshold.to_bits(),
            continuity_s: self.when.seconds,
            stride: self.stride,
            general: self.general,
            digest: String::new(),
        };
        file.digest = digest(&file);
        serde_json::to_string(&file).unwrap_or_default() + "\n"
    }

    /// Reads models from the text of a file.
    ///
    /// # Errors
    /// [`ModelsError`].
    pub fn read(text: &str) -> Result<Models, ModelsError> {
        #[derive(Deserialize)]
        struct Kind {
            format: String,
            version: u32,
        }
        let kind: Kind = serde_json::from_str(text).map_err(ModelsError::NoModels)?;
        if kind.format != FORMAT {
            return Err(ModelsError::Format(kind.format));
        }
        if kind.version != VERSION {
            return Err(ModelsError::Version(kind.version));
        }
        let mut file: File = serde_json::from_str(text).map_err(ModelsError::Partial)?;
        let said = std::mem::take(&mut file.digest);
        if digest(&file) != said {
            return Err(ModelsError::Digest);
        }
        let number = |bits: &u32| f32::from_bits(*bits);
        let mut all = Vec::new();
        for of in &file.models {
            let parameters = of.parameters.iter().map(number).collect();
            let model =
                Model::new(1, parameters).ok_or_else(|| ModelsError::Parameters { metric: of.metric.name.clone() })?;
            let limits = Limits { low: number(&of.limits[0]), high: number(&of.limits[1]) };
            all.push(OfMetric { metric: of.metric.clone(), limits, model });
        }
        if file.order.iter().any(|at| *at >= all.len()) {
            return Err(ModelsError::Order);
        }
        let when = Continuity { threshold: number(&file.threshold), seconds: file.continuity_s };
        Ok(Models {
            about: file.about,
            all,
            order: file.order,
            when,
            stride: file.stride.max(1),
            general: file.general,
        })
    }

    /// Returns pairs of model and metric of the series to examine, in the order of priority.
    fn fitting(&self, series: &Series) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for at in &self.order {
            let Some(own) = self.all.get(*at) else { continue };
            let named = |place: usize| series.metrics[place].name == own.metric.name;
            let alike = |place: usize| {
                let of = &series.metrics[place];
                self.general && of.family == own.metric.family && !self.all.iter().any(|m| m.metric.name == of.name)
            };
            let fits = (0..series.metrics.len()).filter(|place| named(*place) || alike(*place));
            let new: Vec<usize> = fits.filter(|place| all.iter().all(|(_, known)| known != place)).collect();
            all.extend(new.into_iter().map(|place| (*at, place)));
        }
        all
    }

    /// Returns the largest deviation per metric (in the order of priority) and window. The order of
    /// metrics is learned from these.
    #[must_use]
    pub fn deviations(&self, series: &Series) -> Vec<Vec<Option<crate::minder::Candidate>>> {
        let of = |(at, place): &(usize, usize)| {
            let own = &self.all[*at];
            let mut one = Series::new(vec![own.metric.clone()], series.roles.clone(), series.seconds());
            (0..series.seconds()).for_each(|second| one.row_mut(0, second).copy_from_slice(series.row(*place, second)));
            let models = std::slice::from_ref(&own.model);
            let limits = if self.general { Limits::of(series.metric(*place).iter().copied()) } else { own.limits };
            let found = candidates(&one, &[limits], Embedding::Each(models), Distance::Euclid, self.stride);
            found.by_metric.into_iter().next().unwrap_or_default()
        };
        self.fitting(series).iter().map(of).collect()
    }
}

impl Detector for Models {
    /// Examines each metric on its own, like Minder, and returns the earliest verdict. Ties go to
    /// the metric with the higher priority.
    fn first(&self, series: &Series) -> Option<Verdict> {
        let by_metric = self.deviations(series);
        let places: Vec<usize> = self.fitting(series).into_iter().map(|(_, place)| place).collect();
        let found = crate::minder::Candidates { stride: self.stride, by_metric };
        let order: Vec<usize> = (0..places.len()).collect();
        let mut verdict = found.first(&order, &self.when)?;
        verdict.metrics.iter_mut().for_each(|m| *m = places.get(*m).copied().unwrap_or(*m));
        Some(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use proptest::prelude::*;

    fn normal() -> Series {
        let mut series = Series::new(vec![by_name("cpu").0, by_name("fan").0], vec![0; 6], 120);
        for second in 0..120 {
            for (machine, value) in series.row_mut(0, second).iter_mut().enumerate() {
                *value = 5.0 + ((second * 7 + machine * 3) % 5) as f32;
            }
        }
        series
    }

    #[test]
    fn a_file_holds_what_was_trained_and_nothing_that_was_changed() {
        let how = Training { epochs: 2, ..Training::default() };
        let models = Models::trained(&[normal()], &how, None, "a test").unwrap();
        assert_eq!(models.all.len(), 1, "a metric that never told anything has no model");
        let text = models.written();
        assert_eq!(
            text,
            Models::trained(&[normal()], &how, None, "a test").unwrap().written(),
            "the same from the same seed"
        );
        assert_eq!(Models::read(&text).unwrap().written(), text);
        let tuned = Models::trained(&[normal()], &how, Some(&models), "a test").unwrap();
        assert_ne!(tuned.written(), text);
        assert!(
            Models::read(&text.replacen("\"version\":1", "\"version\":2", 1))
                .unwrap_err()
                .to_string()
                .contains("version is 2")
        );
        assert!(Models::read("{}").unwrap_err().to_string().contains("not a models file"));
        assert!(Models::trained(&[], &how, None, "").is_err());
        assert!(models.first(&normal()).is_none());
    }

    proptest! {
        #[test]
        fn no_changed_digit_is_read(at in 0usize..4000, digit in b'0'..=b'9') {
            static TEXT: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
                Models::trained(&[normal()], &Training { epochs: 1, ..Training::default() }, None, "a test").unwrap().written()
            });
            let mut bytes = TEXT.clone().into_bytes();
            let at = at % bytes.len();
            if bytes[at].is_ascii_digit() && bytes[at] != digit {
                bytes[at] = digit;
                prop_assert!(Models::read(std::str::from_utf8(&bytes).unwrap()).is_err());
            }
        }
    }
}

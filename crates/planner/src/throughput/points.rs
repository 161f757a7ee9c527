//! Measured points, as a table with a source for each (CSV), and the calibration derived from them.

use super::{Hardware, Layout, ModelError, Recompute, Transformer};

/// The use of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Constants may be fitted to it.
    Fit,
    /// Constants are never fitted to it, only checked against it.
    HeldOut,
    /// It is only printed.
    Shown,
}

/// One measured layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The publication that reports it.
    pub source: String,
    /// Name of the hardware.
    pub hardware: String,
    /// The model.
    pub model: Transformer,
    /// The layout.
    pub layout: Layout,
    /// Measured TFLOP/s per GPU, including recomputation if `counts_again` is set.
    pub tflops: f64,
    /// Whether `tflops` are hardware FLOP/s, as in SC'21 and BigScience; otherwise, they are model
    /// FLOP/s.
    pub counts_again: bool,
    /// Its use.
    pub split: Split,
}

/// The header of the table.
const COLUMNS: &str = "source,hardware,model,hidden,layers,heads,vocabulary,sequence,batch,gpus,tensor,pipeline,interleaved,micro_batch,recompute,sequence_parallel,divided_optimizer,counts,tflops_per_gpu,split";

/// An invalid table of points.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointsError {
    #[error("the points' first line must be: {COLUMNS}")]
    Header,
    #[error("line {line} of the points: {source}")]
    Line { line: usize, source: PointError },
}

/// An invalid line of a table of points.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointError {
    #[error("too few columns")]
    TooFewColumns,
    #[error("{0} columns instead of 20")]
    Columns(usize),
    #[error("{0} is not a number")]
    Number(String),
    #[error("{0} is neither yes nor no")]
    Flag(String),
    #[error("{tensor} times {pipeline} does not divide {gpus} GPUs")]
    Division { tensor: u64, pipeline: u64, gpus: u64 },
    #[error("recompute = {0} is invalid; give none, selective or full")]
    Recompute(String),
    #[error("TFLOP/s must be greater than zero")]
    Tflops,
    #[error("counts = {0} is neither hardware nor model")]
    Counts(String),
    #[error("split = {0} is invalid; give fit, held-out or shown")]
    Split(String),
    #[error(transparent)]
    Model(#[from] ModelError),
}

fn point(line: &str) -> Result<Point, PointError> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let [source, hardware, name, hidden, layers, heads, vocabulary, sequence, batch, gpus, tensor, pipeline, rest @ ..] =
        cells.as_slice()
    else {
        return Err(PointError::TooFewColumns);
    };
    let [interleaved, micro_batch, recompute, along, divided, counts, tflops, split] = rest else {
        return Err(PointError::Columns(cells.len()));
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| PointError::Number(text.to_owned()));
    let flag = |text: &str| match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(PointError::Flag(text.to_owned())),
    };
    let (gpus, tensor, pipeline) = (number(gpus)?, number(tensor)?, number(pipeline)?);
    if tensor * pipeline == 0 || gpus == 0 || gpus % (tensor * pipeline) != 0 {
        return Err(PointError::Division { tensor, pipeline, gpus });
    }
    let model = Transformer {
        name: (*name).to_owned(),
        hidden: number(hidden)?,
        layers: number(layers)?,
        heads: number(heads)?,
        key_heads: 0,
        inner: 0,
        gated: false,
        untied: false,
        vocabulary: number(vocabulary)?,
        sequence: number(sequence)?,
        batch: number(batch)?,
    };
    let layout = Layout {
        tensor,
        pipeline,
        data: gpus / tensor / pipeline,
        micro_batch: number(micro_batch)?.max(1),
        interleaved: number(interleaved)?.max(1),
        recompute: Recompute::named(recompute).ok_or_else(|| PointError::Recompute((*recompute).to_owned()))?,
        sequence_parallel: flag(along)?,
        divided_optimizer: flag(divided)?,
    };
    let tflops = tflops.parse::<f64>().ok().filter(|t| *t > 0.0 && *t < 1e5);
    Ok(Point {
        source: (*source).to_owned(),
        hardware: (*hardware).to_owned(),
        model: model.checked()?,
        layout,
        tflops: tflops.ok_or(PointError::Tflops)?,
        counts_again: match *counts {
            "hardware" => true,
            "model" => false,
            other => return Err(PointError::Counts(other.to_owned())),
        },
        split: match *split {
            "fit" => Split::Fit,
            "held-out" => Split::HeldOut,
            "shown" => Split::Shown,
            other => return Err(PointError::Split(other.to_owned())),
        },
    })
}

impl Point {
    /// Returns the built-in published points.
    #[must_use]
    pub fn published() -> Vec<Point> {
        Point::read(include_str!("points.csv")).unwrap_or_default()
    }

    /// Parses a comma-separated table, in which `#` begins a comment line.
    ///
    /// # Errors
    /// Fails if the header or a line is invalid. The error has the line's number.
    pub fn read(text: &str) -> Result<Vec<Point>, PointsError> {
        let mut lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
        match lines.next() {
            Some((_, first)) if first.trim() == COLUMNS => {}
            _ => return Err(PointsError::Header),
        }
        lines.map(|(at, l)| point(l).map_err(|source| PointsError::Line { line: at + 1, source })).collect()
    }

    /// Returns the model FLOP/s of all GPUs together.
    #[must_use]
    pub fn achieved(&self) -> f64 {
        let counted = if self.counts_again { self.layout.recompute } else { Recompute::Nothing };
        let share = self.model.operations(Recompute::Nothing) / self.model.operations(counted);
        self.tflops * 1e12 * self.layout.gpus() as f64 * share
    }
}

/// Points measured on the user's own cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    points: Vec<Point>,
}

impl Calibration {
    /// Creates a calibration from measured points.
    #[must_use]
    pub fn of(points: Vec<Point>) -> Self {
        Calibration { points }
    }

    fn of_model<'c>(&'c self, model: &'c Transformer, on: &'c Hardware) -> impl Iterator<Item = &'c Point> {
        let same = |p: &&Point| Transformer { name: model.name.clone(), ..p.model.clone() } == *model;
        self.points.iter().filter(|p| p.hardware == on.name).filter(same)
    }

    /// Returns the measured layouts of this model on `gpus` GPUs.
    pub(super) fn layouts(&self, model: &Transformer, gpus: u64, on: &Hardware) -> Vec<Layout> {
        self.of_model(model, on).map(|p| p.layout.clone()).filter(|l| l.gpus() == gpus).collect()
    }

    /// Returns the measured model FLOP/s of all GPUs for exactly this layout, if any.
    #[must_use]
    pub fn measured(&self, model: &Transformer, layout: &Layout, on: &Hardware) -> Option<f64> {
        self.of_model(model, on).find(|p| p.layout == *layout).map(Point::achieved)
    }

    /// Returns the factor by which to multiply computed speeds of this model: the mean ratio of
    /// measured to computed speed over its points, or over all points of this hardware if it has
    /// none; 1 without any.
    #[must_use]
    pub fn scale(&self, model: &Transformer, on: &Hardware) -> f64 {
        let here: Vec<&Point> = self.points.iter().filter(|p| p.hardware == on.name).collect();
        let shape = |p: &Point| (p.model.hidden, p.model.layers) == (model.hidden, model.layers);
        let own: Vec<&Point> = here.iter().copied().filter(|p| shape(p)).collect();
        let used = if own.is_empty() { here } else { own };
        if used.is_empty() {
            return 1.0;
        }
        let ratio = |p: &&Point| {
            let computed = p.model.operations(Recompute::Nothing) / super::iteration(&p.model, &p.layout, on).total();
            p.achieved() / computed
        };
        used.iter().map(ratio).sum::<f64>() / used.len() as f64
    }
}

//! A trained network, ready for use.

use super::network::{Layout, WINDOW};
use super::real::LANES;
use super::rewrite::Rewrite;
use super::train::{Training, train, train_from};

/// A network and its parameters.
#[derive(Clone, Debug)]
pub struct Model {
    layout: Layout,
    parameters: Vec<f32>,
}

impl Model {
    /// Creates a model from its parameters, or returns `None` if their number is wrong.
    #[must_use]
    pub fn new(width: usize, parameters: Vec<f32>) -> Option<Model> {
        let layout = Layout::new(width);
        (parameters.len() == layout.parameters()).then_some(Model { layout, parameters })
    }

    /// Trains a model on windows of `width` metrics.
    #[must_use]
    pub fn trained(width: usize, windows: &[&[f32]], how: &Training) -> Model {
        let layout = Layout::new(width);
        let parameters = train(&layout, windows, how);
        Model { layout, parameters }
    }

    /// Returns the model after further training on other windows of the same metric.
    #[must_use]
    pub fn tuned(&self, windows: &[&[f32]], how: &Training) -> Model {
        let parameters = train_from(&self.layout, self.parameters.clone(), windows, how);
        Model { layout: Layout::new(self.layout.width), parameters }
    }

    /// Returns the trained parameters.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Reconstructs the windows of all machines. The input is by metric, second, and machine; the
    /// result is by second and metric, then by machine.
    #[must_use]
    pub fn rewritten(&self, windows: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
        let width = self.layout.width;
        let machines = windows.first().and_then(|w| w.first()).map_or(0, Vec::len);
        // Pads the machines to fill registers of any width.
        let whole = machines.next_multiple_of(LANES);
        let by_second = (0..WINDOW).flat_map(|second| windows.iter().map(move |window| &window[second]));
        let padded: Vec<Vec<f32>> =
            by_second.map(|row| row.iter().copied().chain(std::iter::repeat(0.0)).take(whole).collect()).collect();
        let rows: Vec<&[f32]> = padded.iter().map(Vec::as_slice).collect();
        let mut out = vec![vec![0.0; whole]; WINDOW * width];
        pulp::Arch::new().dispatch(Rewrite { of: &self.layout, p: &self.parameters, windows: &rows, out: &mut out });
        out.iter_mut().for_each(|row| row.truncate(machines));
        out
    }
}

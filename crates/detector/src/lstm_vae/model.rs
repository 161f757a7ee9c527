//! A trained network, ready for use.

use super::network::{Layout, WINDOW, reconstruct};
use super::real::{Fast, LANES};
use super::train::{Training, train};

/// A network and its parameters.
#[derive(Clone, Debug)]
pub struct Model {
    layout: Layout,
    parameters: Vec<f32>,
}

impl Model {
    /// With these parameters; `None` if they are not as many as it has.
    #[must_use]
    pub fn new(width: usize, parameters: Vec<f32>) -> Option<Model> {
        let layout = Layout::new(width);
        (parameters.len() == layout.parameters()).then_some(Model { layout, parameters })
    }

    /// Trained on windows of `width` metrics.
    #[must_use]
    pub fn trained(width: usize, windows: &[&[f32]], how: &Training) -> Model {
        let layout = Layout::new(width);
        let parameters = train(&layout, windows, how);
        Model { layout, parameters }
    }

    /// All numbers that training has found.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Windows of all machines written again: by metric, by second, by machine; the result by second and metric, then by machine.
    #[must_use]
    pub fn rewritten(&self, windows: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
        let width = self.layout.width;
        let machines = windows.first().and_then(|w| w.first()).map_or(0, Vec::len);
        let mut out = vec![vec![0.0; machines]; WINDOW * width];
        let (mut input, mut output) = (vec![[0.0; LANES]; WINDOW * width], vec![[0.0; LANES]; WINDOW * width]);
        for from in (0..machines).step_by(LANES) {
            let until = (from + LANES).min(machines);
            for second in 0..WINDOW {
                for (metric, window) in windows.iter().enumerate() {
                    input[second * width + metric][..until - from].copy_from_slice(&window[second][from..until]);
                }
            }
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || reconstruct::<f32, Fast>(&self.layout, &self.parameters, &input, &mut output),
            );
            for (out, lanes) in out.iter_mut().zip(&output) {
                out[from..until].copy_from_slice(&lanes[..until - from]);
            }
        }
        out
    }
}

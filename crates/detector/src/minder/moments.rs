//! Windows as moments, with the distance of Mahalanobis (1936): a baseline in Minder's evaluation
//! (section 6.1).

/// Number of moments per window.
const MOMENTS: usize = 4;

/// Returns the moments, by moment and then by machine. They are decorrelated over the machines and
/// have variance 1, so plain distances are Mahalanobis distances.
pub fn of(window: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let machines = window.first().map_or(0, Vec::len);
    let count = window.len() as f64;
    let mut all: Vec<[f64; MOMENTS]> = Vec::with_capacity(machines);
    for m in 0..machines {
        let about = |power: i32, center: f64| {
            window.iter().map(|row| (f64::from(row[m]) - center).powi(power)).sum::<f64>() / count
        };
        let mean = about(1, 0.0);
        let variance = about(2, mean);
        let scale = variance.sqrt().max(1e-6);
        all.push([mean, variance, about(3, mean) / scale.powi(3), about(4, mean) / scale.powi(4)]);
    }
    let n = machines.max(1) as f64;
    let mean: [f64; MOMENTS] = std::array::from_fn(|k| all.iter().map(|x| x[k]).sum::<f64>() / n);
    all.iter_mut().for_each(|x| x.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean));
    let lower = factor(&all, n);
    // Solves lower * y = x for each machine.
    let mut out = vec![vec![0.0f32; machines]; MOMENTS];
    for (m, x) in all.iter().enumerate() {
        let mut y = [0.0; MOMENTS];
        for k in 0..MOMENTS {
            let known: f64 = (0..k).map(|j| lower[k][j] * y[j]).sum();
            y[k] = (x[k] - known) / lower[k][k];
            out[k][m] = y[k] as f32;
        }
    }
    out
}

/// Returns the Cholesky factor of the covariance. A little is added to each variance, because a
/// moment may not vary at all.
fn factor(all: &[[f64; MOMENTS]], n: f64) -> [[f64; MOMENTS]; MOMENTS] {
    let mut lower = [[0.0; MOMENTS]; MOMENTS];
    for i in 0..MOMENTS {
        for j in 0..=i {
            let covariance = all.iter().map(|x| x[i] * x[j]).sum::<f64>() / n;
            let known: f64 = (0..j).map(|k| lower[i][k] * lower[j][k]).sum();
            lower[i][j] = if i == j {
                (covariance + 1e-9 * (1.0 + covariance) - known).max(1e-12).sqrt()
            } else {
                (covariance - known) / lower[j][j]
            };
        }
    }
    lower
}

#[cfg(test)]
mod tests {
    #[test]
    fn moments_are_uncorrelated() {
        let window: Vec<Vec<f32>> = (0..8)
            .map(|t| (0..50).map(|m| ((m * 37 + t * 11) % 17) as f32 * 0.05 + m as f32 * 0.01).collect())
            .collect();
        let all = super::of(&window);
        for a in 0..4 {
            for b in 0..4 {
                let covariance = all[a].iter().zip(&all[b]).map(|(x, y)| f64::from(x * y)).sum::<f64>() / 50.0;
                let expected = f64::from(u8::from(a == b));
                assert!((covariance - expected).abs() < 1e-3, "{a} {b} {covariance}");
            }
        }
    }
}

//! Number types for the network: `f32` for use, and `f64` to check derivatives. Only operations
//! that give the same bits on every machine are used.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A floating-point type.
pub trait Real:
    Copy
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Returns the nearest value of this type.
    fn of(value: f64) -> Self;
    /// Hyperbolic tangent, accurate to the last bits.
    #[cfg(test)]
    fn tanh(self) -> Self;
    /// Exponential, accurate to the last bits.
    fn exp(self) -> Self;
    /// Clamps the value to the range from `low` to `high`.
    fn within(self, low: Self, high: Self) -> Self;
}

impl Real for f32 {
    fn of(value: f64) -> f32 {
        value as f32
    }
    #[cfg(test)]
    fn tanh(self) -> f32 {
        libm::tanhf(self)
    }
    fn exp(self) -> f32 {
        libm::expf(self)
    }
    #[inline(always)]
    fn within(self, low: f32, high: f32) -> f32 {
        self.max(low).min(high)
    }
}

impl Real for f64 {
    fn of(value: f64) -> f64 {
        value
    }
    #[cfg(test)]
    fn tanh(self) -> f64 {
        libm::tanh(self)
    }
    fn exp(self) -> f64 {
        libm::exp(self)
    }
    fn within(self, low: f64, high: f64) -> f64 {
        self.max(low).min(high)
    }
}

/// Number of windows computed side by side.
pub const LANES: usize = 16;

/// One number per window.
pub type Lanes<T> = [T; LANES];

/// A way to compute activation functions.
pub trait Activation {
    /// Hyperbolic tangent.
    fn tanh<T: Real>(x: T) -> T;
    /// Logistic function.
    #[inline(always)]
    fn sigmoid<T: Real>(x: T) -> T {
        let half = T::of(0.5);
        half + half * Self::tanh(half * x)
    }
}

/// Accurate to the last bits: the reference for [`Fast`].
#[cfg(test)]
pub struct Exact;

#[cfg(test)]
impl Activation for Exact {
    #[inline(always)]
    fn tanh<T: Real>(x: T) -> T {
        x.tanh()
    }
}

/// Lambert's continued fraction, truncated after its seventh term: an error of at most 1e-4 for a
/// few multiplications and one division, in whole registers.
pub struct Fast;

impl Activation for Fast {
    #[inline(always)]
    fn tanh<T: Real>(x: T) -> T {
        let x = x.within(T::of(-4.97), T::of(4.97));
        let s = x * x;
        let above = x * (T::of(135_135.0) + s * (T::of(17_325.0) + s * (T::of(378.0) + s)));
        let below = T::of(135_135.0) + s * (T::of(62_370.0) + s * (T::of(3150.0) + s * T::of(28.0)));
        above / below
    }
}

/// Computes `to += weight * x` in each lane.
#[inline(always)]
pub fn add_times<T: Real>(to: &mut Lanes<T>, weight: T, x: &Lanes<T>) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += weight * *x;
    }
}

/// Returns the sum of a product over all lanes.
#[inline(always)]
pub fn dot<T: Real>(a: &Lanes<T>, b: &Lanes<T>) -> T {
    let mut sum = T::default();
    for (a, b) in a.iter().zip(b) {
        sum += *a * *b;
    }
    sum
}

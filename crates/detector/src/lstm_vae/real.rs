//! Numbers that a network is computed with: `f32` for use, `f64` where derivatives are checked. Only what gives the same bits everywhere.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A number.
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
    /// The nearest.
    fn of(value: f64) -> Self;
    /// Exact to the last bits.
    #[cfg(test)]
    fn tanh(self) -> Self;
    /// Exact to the last bits.
    fn exp(self) -> Self;
    /// Between two others.
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

/// Sixteen windows side by side.
pub const LANES: usize = 16;

/// One number of each.
pub type Lanes<T> = [T; LANES];

/// How activations are computed.
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

/// To the last bits: what the fast one is compared with.
#[cfg(test)]
pub struct Exact;

#[cfg(test)]
impl Activation for Exact {
    #[inline(always)]
    fn tanh<T: Real>(x: T) -> T {
        x.tanh()
    }
}

/// Lambert's continued fraction, cut off after the seventh: at most 1e-4 off, a few multiplications and a division, in whole registers.
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

/// `to += weight * x`, in each lane.
#[inline(always)]
pub fn add_times<T: Real>(to: &mut Lanes<T>, weight: T, x: &Lanes<T>) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += weight * *x;
    }
}

/// The sum over all lanes of a product.
#[inline(always)]
pub fn dot<T: Real>(a: &Lanes<T>, b: &Lanes<T>) -> T {
    let mut sum = T::default();
    for (a, b) in a.iter().zip(b) {
        sum += *a * *b;
    }
    sum
}

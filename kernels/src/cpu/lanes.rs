//! Vectors of f32 as the kernels see them: one trait, implemented by a plain f32 and by each
//! instruction set.
//!
//! Always true here: an operation rounds each lane once, as IEEE 754 defines, and is never fused
//! with another one. So a kernel that is written once over [`Lanes`] gives the same bits with every
//! implementation (a NaN's payload aside), and [`f32`] is its scalar twin.
//!
//! A vector is the witness that the machine has its instruction set, so its methods are safe. Only
//! [`Lanes::load`] makes a vector without another one. Its caller has asked the machine
//! (`dispatch.rs`).
#![expect(
    unsafe_code,
    reason = "vector instructions, on vectors that exist only where the machine has been asked"
)]

use std::ops::{Add, Div, Mul, Sub};

/// `WIDTH` lanes of f32.
pub(crate) trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// Number of lanes.
    const WIDTH: usize;

    /// One value in all lanes. `self` is the witness only: its value does not matter.
    fn splat(self, value: f32) -> Self;

    /// Reads `WIDTH` values.
    ///
    /// # Safety
    /// They can be read, aligned or not, and the machine has the instruction set.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes `WIDTH` values.
    ///
    /// # Safety
    /// They can be written, aligned or not.
    unsafe fn store(self, to: *mut f32);

    /// Writes `WIDTH` values past the caches, where the instruction set can.
    ///
    /// # Safety
    /// They can be written, and `to` is aligned to all lanes.
    unsafe fn stream(self, to: *mut f32);

    /// Square root.
    fn sqrt(self) -> Self;

    /// `self > other ? self : other`, and so `other` when one of them is NaN or both are zero.
    fn max(self, other: Self) -> Self;

    /// Returns the value without its sign.
    fn abs(self) -> Self;

    /// Returns the value with the sign of `sign`; `self` must not have one.
    fn with_sign_of(self, sign: Self) -> Self;
}

impl Lanes for f32 {
    const WIDTH: usize = 1;

    #[inline(always)]
    fn splat(self, value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(self) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self::sqrt(self)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self::abs(self)
    }

    #[inline(always)]
    fn with_sign_of(self, sign: Self) -> Self {
        self.copysign(sign)
    }
}

/// Operators and methods of a vector type, from the intrinsics that have them.
macro_rules! lanes {
    (
        $(#[$doc:meta])* $name:ident($register:ty), width = $width:literal,
        $splat:ident, $load:ident, $store:ident, $stream:ident,
        $add:ident, $sub:ident, $mul:ident, $div:ident, $sqrt:ident,
        max($left:ident, $right:ident) = $max:expr,
        abs($plain:ident) = $abs:expr,
        with_sign_of($magnitude:ident, $sign:ident) = $with_sign:expr,
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(in crate::cpu) struct $name($register);

        lanes!(@operator $name, Add, add, $add);
        lanes!(@operator $name, Sub, sub, $sub);
        lanes!(@operator $name, Mul, mul, $mul);
        lanes!(@operator $name, Div, div, $div);

        impl Lanes for $name {
            const WIDTH: usize = $width;

            #[inline(always)]
            fn splat(self, value: f32) -> Self {
                // SAFETY: `self` is the witness.
                Self(unsafe { $splat(value) })
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the caller's promise.
                Self(unsafe { $load(from) })
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: `self` is the witness; the caller's promise.
                unsafe { $store(to, self.0) }
            }

            #[inline(always)]
            unsafe fn stream(self, to: *mut f32) {
                // SAFETY: `self` is the witness; the caller's promise.
                unsafe { $stream(to, self.0) }
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                // SAFETY: `self` is the witness.
                Self(unsafe { $sqrt(self.0) })
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let ($left, $right) = (self.0, other.0);
                // SAFETY: `self` is the witness.
                Self(unsafe { $max })
            }

            #[inline(always)]
            fn abs(self) -> Self {
                let $plain = self.0;
                // SAFETY: `self` is the witness.
                Self(unsafe { $abs })
            }

            #[inline(always)]
            fn with_sign_of(self, sign: Self) -> Self {
                let ($magnitude, $sign) = (self.0, sign.0);
                // SAFETY: `self` is the witness.
                Self(unsafe { $with_sign })
            }
        }
    };
    (@operator $name:ident, $trait:ident, $method:ident, $intrinsic:ident) => {
        impl $trait for $name {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: `self` is the witness.
                Self(unsafe { $intrinsic(self.0, other.0) })
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! AVX2 and AVX-512. `max` is the instruction's own rule: the second operand when one is NaN or
    //! both are zero.

    use std::arch::x86_64::*;

    use super::*;

    lanes! {
        /// 8 lanes.
        Avx2(__m256), width = 8,
        _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_stream_ps,
        _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_sqrt_ps,
        max(left, right) = _mm256_max_ps(left, right),
        abs(value) = _mm256_andnot_ps(_mm256_set1_ps(-0.0), value),
        with_sign_of(value, sign) = _mm256_or_ps(value, _mm256_and_ps(_mm256_set1_ps(-0.0), sign)),
    }

    lanes! {
        /// 16 lanes. Bitwise operations on floats would need AVX-512DQ, on integers they do not.
        Avx512(__m512), width = 16,
        _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_stream_ps,
        _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_sqrt_ps,
        max(left, right) = _mm512_max_ps(left, right),
        abs(value) = _mm512_castsi512_ps(_mm512_andnot_si512(
            _mm512_set1_epi32(i32::MIN),
            _mm512_castps_si512(value),
        )),
        with_sign_of(value, sign) = _mm512_castsi512_ps(_mm512_or_si512(
            _mm512_castps_si512(value),
            _mm512_and_si512(_mm512_set1_epi32(i32::MIN), _mm512_castps_si512(sign)),
        )),
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) mod arm {
    //! NEON. It has no stores past the caches that a compiler offers, and its own maximum would
    //! return NaN.

    use std::arch::aarch64::*;

    use super::*;

    lanes! {
        /// 4 lanes.
        Neon(float32x4_t), width = 4,
        vdupq_n_f32, vld1q_f32, vst1q_f32, vst1q_f32,
        vaddq_f32, vsubq_f32, vmulq_f32, vdivq_f32, vsqrtq_f32,
        max(left, right) = vbslq_f32(vcgtq_f32(left, right), left, right),
        abs(value) = vabsq_f32(value),
        with_sign_of(value, sign) = vbslq_f32(vdupq_n_u32(1 << 31), sign, value),
    }
}

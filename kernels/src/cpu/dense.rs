//! The three products of a dense layer, for matrices in row-major f32, and what lies between two
//! layers.
//!
//! The source fixes the order of each sum, and the compiler does not reorder floating-point
//! additions. So results do not depend on vector width or optimisation level. [`dot`] therefore has
//! its lanes in the source.

/// Lanes of [`dot`]: two vectors of 256 bits.
const LANES: usize = 16;

/// Computes `y = x wᵗ + b`. Shapes: `x [n, inputs]`, `w [outputs, inputs]`, `b [outputs]`, result
/// `[n, outputs]`.
pub fn forward(x: &[f32], w: &[f32], b: &[f32]) -> Vec<f32> {
    let (outputs, inputs) = (b.len(), w.len() / b.len());
    let mut y = vec![0.0; x.len() / inputs * outputs];
    // One row of weights stays in the nearest cache while all records pass by.
    for (output, (w, b)) in w.chunks_exact(inputs).zip(b).enumerate() {
        for (x, y) in x.chunks_exact(inputs).zip(y.chunks_exact_mut(outputs)) {
            y[output] = dot(x, w) + b;
        }
    }
    y
}

/// Computes `(dyᵗ x, sum of dy over the records)`. Shapes: `dy [n, outputs]`, `x [n, inputs]`,
/// results `[outputs, inputs]` and `[outputs]`.
pub fn weight_gradient(dy: &[f32], x: &[f32], outputs: usize, inputs: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut dw, mut db) = (vec![0.0; outputs * inputs], vec![0.0; outputs]);
    for (output, (dw, db)) in dw.chunks_exact_mut(inputs).zip(&mut db).enumerate() {
        for (dy, x) in dy.chunks_exact(outputs).zip(x.chunks_exact(inputs)) {
            add_scaled(dw, dy[output], x);
            *db += dy[output];
        }
    }
    (dw, db)
}

/// Computes `dy w`. Shapes: `dy [n, outputs]`, `w [outputs, inputs]`, result `[n, inputs]`.
pub fn input_gradient(dy: &[f32], w: &[f32], outputs: usize, inputs: usize) -> Vec<f32> {
    let mut dx = vec![0.0; dy.len() / outputs * inputs];
    for (dy, dx) in dy.chunks_exact(outputs).zip(dx.chunks_exact_mut(inputs)) {
        for (&dy, w) in dy.iter().zip(w.chunks_exact(inputs)) {
            add_scaled(dx, dy, w);
        }
    }
    dx
}

/// Makes negative values 0. NaN stays, and shows that the job diverged.
pub fn relu(values: &mut [f32]) {
    // `max` would turn NaN into 0.
    values.iter_mut().filter(|value| **value < 0.0).for_each(|value| *value = 0.0);
}

/// Multiplies a gradient by the slope of [`relu`] at its answers.
pub fn relu_slope(gradient: &mut [f32], answers: &[f32]) {
    for (gradient, answer) in gradient.iter_mut().zip(answers) {
        match *answer > 0.0 {
            true => {}
            false => *gradient = 0.0,
        }
    }
}

/// Multiplies a gradient by the slope of the hyperbolic tangent at its answers.
pub fn tanh_slope(gradient: &mut [f32], answers: &[f32]) {
    for (gradient, answer) in gradient.iter_mut().zip(answers) {
        *gradient *= 1.0 - answer * answer;
    }
}

/// Computes `sum += factor * x`.
fn add_scaled(sum: &mut [f32], factor: f32, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// Computes `sum(a[i] * b[i])`. Lane l sums i = l, l + 16, .., then the lanes are added in order,
/// then the rest.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let sum: f32 = lanes.iter().sum();
    a_rest.iter().zip(b_rest).fold(sum, |sum, (a, b)| sum + a * b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns small whole numbers: every sum is exact, so any order gives the same.
    fn matrix(rows: usize, columns: usize, salt: usize) -> Vec<f32> {
        (0..rows * columns).map(|at| ((at * 7 + salt) % 11) as f32 - 5.0).collect()
    }

    #[test]
    fn a_slope_is_that_of_the_answers_and_nan_is_not_hidden() {
        let answers = [-1.0, -0.0, 0.0, 0.5, f32::NAN];
        let mut values = answers;
        relu(&mut values);
        assert_eq!(values.map(f32::to_bits), [0.0, -0.0, 0.0, 0.5, f32::NAN].map(f32::to_bits));
        let mut gradient = [3.0; 5];
        relu_slope(&mut gradient, &answers);
        assert_eq!(gradient, [0.0, 0.0, 0.0, 3.0, 0.0]);
        let mut gradient = [3.0; 5];
        tanh_slope(&mut gradient, &answers);
        assert_eq!(gradient[..4], [0.0, 3.0, 3.0, 2.25]);
        assert!(gradient[4].is_nan());
    }

    #[test]
    fn products_equal_the_textbook_at_every_width() {
        for inputs in (1..=33).chain([64, 100]) {
            let (n, outputs) = (3, 4);
            let (x, w, dy) = (matrix(n, inputs, 1), matrix(outputs, inputs, 2), matrix(n, outputs, 3));
            let b = matrix(1, outputs, 4);
            let (y, dx) = (forward(&x, &w, &b), input_gradient(&dy, &w, outputs, inputs));
            let (dw, db) = weight_gradient(&dy, &x, outputs, inputs);
            for r in 0..n {
                for o in 0..outputs {
                    let expected: f32 = (0..inputs).map(|i| x[r * inputs + i] * w[o * inputs + i]).sum();
                    assert_eq!(y[r * outputs + o], expected + b[o], "{inputs} inputs");
                }
                for i in 0..inputs {
                    let expected: f32 = (0..outputs).map(|o| dy[r * outputs + o] * w[o * inputs + i]).sum();
                    assert_eq!(dx[r * inputs + i], expected, "{inputs} inputs");
                }
            }
            for o in 0..outputs {
                assert_eq!(db[o], (0..n).map(|r| dy[r * outputs + o]).sum::<f32>());
                for i in 0..inputs {
                    let expected: f32 = (0..n).map(|r| dy[r * outputs + o] * x[r * inputs + i]).sum();
                    assert_eq!(dw[o * inputs + i], expected, "{inputs} inputs");
                }
            }
        }
    }
}

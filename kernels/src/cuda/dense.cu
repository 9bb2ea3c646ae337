
// Twin of cpu/dense.rs. Matrices are row-major. Each thread makes whole elements of a product, and
// adds in the order of the twin.
#define LANES 16

// Lane l sums i = l, l + 16, .., then the lanes are added in order, then the rest.
static __device__ inline float dot(const float* a, const float* b, u64 length) {
    float lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        lanes[lane] = 0.0f;
    }
    u64 at = 0;
    for (; at + LANES <= length; at += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            lanes[lane] = lanes[lane] + a[at + lane] * b[at + lane];
        }
    }
    // Where sums of Rust start.
    float sum = -0.0f;
    for (int lane = 0; lane < LANES; ++lane) {
        sum = sum + lanes[lane];
    }
    for (; at < length; ++at) {
        sum = sum + a[at] * b[at];
    }
    return sum;
}

// x [records, inputs], w [outputs, inputs], b [outputs], y [records, outputs].
extern "C" __global__ void dense_forward(const float* x, const float* w, const float* b, float* y,
                                         u64 records, u64 inputs, u64 outputs) {
    for (EACH(at, records * outputs)) {
        const u64 output = at % outputs;
        y[at] = dot(x + at / outputs * inputs, w + output * inputs, inputs) + b[output];
    }
}

// dy [records, outputs], x [records, inputs], dw [outputs, inputs].
extern "C" __global__ void dense_weight_gradient(const float* dy, const float* x, float* dw, u64 records,
                                                 u64 inputs, u64 outputs) {
    for (EACH(at, outputs * inputs)) {
        const float* slope = dy + at / inputs;
        const float* value = x + at % inputs;
        float sum = 0.0f;
        for (u64 record = 0; record < records; ++record) {
            sum = sum + slope[record * outputs] * value[record * inputs];
        }
        dw[at] = sum;
    }
}

// dy [records, outputs], db [outputs].
extern "C" __global__ void dense_bias_gradient(const float* dy, float* db, u64 records, u64 outputs) {
    for (EACH(at, outputs)) {
        float sum = 0.0f;
        for (u64 record = 0; record < records; ++record) {
            sum = sum + dy[record * outputs + at];
        }
        db[at] = sum;
    }
}

// dy [records, outputs], w [outputs, inputs], dx [records, inputs].
extern "C" __global__ void dense_input_gradient(const float* dy, const float* w, float* dx, u64 records,
                                                u64 inputs, u64 outputs) {
    for (EACH(at, records * inputs)) {
        const float* slope = dy + at / inputs * outputs;
        const float* weight = w + at % inputs;
        float sum = 0.0f;
        for (u64 output = 0; output < outputs; ++output) {
            sum = sum + slope[output] * weight[output * inputs];
        }
        dx[at] = sum;
    }
}

extern "C" __global__ void relu(float* values, u64 length) {
    for (EACH(at, length)) {
        values[at] = values[at] < 0.0f ? 0.0f : values[at];
    }
}

extern "C" __global__ void relu_slope(float* gradient, const float* answers, u64 length) {
    for (EACH(at, length)) {
        gradient[at] = answers[at] > 0.0f ? gradient[at] : 0.0f;
    }
}

extern "C" __global__ void tanh_slope(float* gradient, const float* answers, u64 length) {
    for (EACH(at, length)) {
        gradient[at] = gradient[at] * (1.0f - answers[at] * answers[at]);
    }
}

extern "C" __global__ void scale(float* values, float factor, u64 length) {
    for (EACH(at, length)) {
        values[at] = values[at] * factor;
    }
}

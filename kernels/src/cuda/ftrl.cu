
// Twin of cpu/ftrl.rs.
struct Ftrl {
    enum { SLOTS = 2 };
    float learning_rate;
    float beta;
    float l1;
    float l2;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.only(gradient);
        const float more = slots[1] + gradient * gradient;
        const float root = sqrtf(more);
        const float sigma = (root - sqrtf(slots[1])) / learning_rate;
        const float z = slots[0] + (gradient - sigma * weight);
        slots[0] = z;
        slots[1] = more;
        // Zero first: a NaN is not lost in it.
        const float beyond = max_of(0.0f, abs_of(z) - l1);
        const float denominator = (beta + root) / learning_rate + l2;
        return 0.0f - with_sign_of(beyond / denominator, z);
    }
};

RULE(ftrl, Ftrl)

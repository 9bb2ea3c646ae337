
// Twin of cpu/adagrad.rs.
struct Adagrad {
    enum { SLOTS = 1 };
    float learning_rate;
    float eps;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.of(weight, gradient);
        slots[0] = slots[0] + gradient * gradient;
        return weight - learning_rate * gradient / (sqrtf(slots[0]) + eps);
    }
};

RULE(adagrad, Adagrad)


// Twin of cpu/adadelta.rs.
struct Adadelta {
    enum { SLOTS = 2 };
    float kept;
    float share;
    float eps;
    float learning_rate;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.of(weight, gradient);
        const float square = slots[0] * kept + share * gradient * gradient;
        const float delta = sqrtf(slots[1] + eps) / sqrtf(square + eps) * gradient;
        slots[0] = square;
        slots[1] = slots[1] * kept + share * delta * delta;
        return weight - learning_rate * delta;
    }
};

RULE(adadelta, Adadelta)


// Twin of cpu/lamb.rs.
struct Lamb {
    enum { SLOTS = 2 };
    // Only the host uses it.
    double learning_rate;
    float weight_decay;
    float average_share;
    float average_correction;
    float square_kept;
    float square_share;
    float square_correction;
    float eps;
    float step_size;

    __device__ float direction(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.only(gradient);
        const float average = interpolate(slots[0], gradient, average_share);
        const float square = slots[1] * square_kept + square_share * gradient * gradient;
        slots[0] = average;
        slots[1] = square;
        const float root = sqrtf(square / square_correction) + eps;
        return average / average_correction / root + weight_decay * weight;
    }

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        return weight - step_size * direction(mean, weight, gradient, slots);
    }
};

RULE(lamb, Lamb)

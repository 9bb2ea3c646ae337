
// Twin of cpu/momentum.rs.
struct Momentum {
    enum { SLOTS = 1 };
    u32 first;
    float momentum;
    float undamped;
    u32 nesterov;
    float learning_rate;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.of(weight, gradient);
        const float velocity = first ? gradient : slots[0] * momentum + undamped * gradient;
        slots[0] = velocity;
        const float direction = nesterov ? gradient + momentum * velocity : velocity;
        return weight - learning_rate * direction;
    }
};

RULE(momentum, Momentum)

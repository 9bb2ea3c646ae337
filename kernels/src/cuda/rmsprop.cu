
// Twin of cpu/rmsprop.rs. Slots: the square, the velocity if the rule moves, and the average if it
// is centered.
template <bool CENTERED, bool MOVES>
struct Rmsprop {
    enum { SLOTS = 1 + CENTERED + MOVES };
    float kept;
    float share;
    float eps_root;
    float eps;
    float momentum;
    float learning_rate;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.of(weight, gradient);
        const float square = slots[0] * kept + share * gradient * gradient;
        slots[0] = square;
        float variance = square;
        if (CENTERED) {
            const float average = interpolate(slots[SLOTS - 1], gradient, share);
            slots[SLOTS - 1] = average;
            variance = square - average * average;
        }
        const float denominator = sqrtf(variance + eps_root) + eps;
        if (!MOVES) {
            return weight - learning_rate * gradient / denominator;
        }
        slots[1] = slots[1] * momentum + gradient / denominator;
        return weight - learning_rate * slots[1];
    }
};

RULE(rmsprop, Rmsprop<false, false>)
RULE(rmsprop_moving, Rmsprop<false, true>)
RULE(rmsprop_centered, Rmsprop<true, false>)
RULE(rmsprop_centered_moving, Rmsprop<true, true>)

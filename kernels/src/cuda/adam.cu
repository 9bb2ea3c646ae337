
// Twin of cpu/adam.rs. A third slot, of AMSGrad, has the largest square so far.
template <int COUNT>
struct Adam {
    enum { SLOTS = COUNT };
    float shrink;
    float average_share;
    float square_kept;
    float square_share;
    float square_correction;
    float eps_root;
    float eps;
    float step_size;

    __device__ float update(const Mean& mean, float weight, float gradient, float* slots) const {
        gradient = mean.of(weight, gradient);
        const float average = interpolate(slots[0], gradient, average_share);
        const float square = slots[1] * square_kept + square_share * gradient * gradient;
        slots[0] = average;
        slots[1] = square;
        if (COUNT == 3) {
            slots[2] = max_of(slots[2], square);
        }
        const float root = sqrtf(slots[COUNT - 1] + eps_root) / square_correction;
        const float denominator = root + eps;
        return weight * shrink - step_size * average / denominator;
    }
};

RULE(adam, Adam<2>)
RULE(amsgrad, Adam<3>)

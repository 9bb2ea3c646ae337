
// Twin of cpu/sgd.rs.
struct Sgd {
    enum { SLOTS = 0 };
    float learning_rate;

    __device__ float update(const Mean& mean, float weight, float gradient, float*) const {
        gradient = mean.of(weight, gradient);
        return weight - learning_rate * gradient;
    }
};

RULE(sgd, Sgd)

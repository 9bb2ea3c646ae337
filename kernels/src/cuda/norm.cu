
// Twin of cpu/norm.rs: element i is added to sum i mod SUMS, in the order of i. Each thread of the
// one block has one sum. The host adds the sums as a tree.
#define SUMS 16

static __device__ inline double square_of(float value) {
    return (double)value * (double)value;
}

extern "C" __global__ void squares(float scale, const float* gradient, u64 length, double* sums) {
    double sum = 0.0;
    for (u64 at = threadIdx.x; at < length; at += SUMS) {
        sum += square_of(gradient[at] * scale);
    }
    sums[threadIdx.x] = sum;
}

// Sums of the weights, and after them those of the direction.
extern "C" __global__ void squares_of_direction(Lamb rule, Mean mean, Pass pass, double* sums) {
    double of_weights = 0.0;
    double of_direction = 0.0;
    for (u64 at = threadIdx.x; at < pass.length; at += SUMS) {
        float slots[2] = {pass.from[0][at], pass.from[1][at]};
        const float weight = pass.weights[at];
        of_weights += square_of(weight);
        of_direction += square_of(rule.direction(mean, weight, pass.gradient(at), slots));
    }
    sums[threadIdx.x] = of_weights;
    sums[SUMS + threadIdx.x] = of_direction;
}


// Twin of cpu/norm.rs: element i is added to sum i mod SUMS, in the order of i. A block of SUMS
// threads makes the sums of a chunk, each thread one. The host adds them as a tree, and the chunks in
// the order of their numbers.
#define SUMS 16

// Elements that a thread reads before it adds the first of them, so that it waits for memory once.
#define READ_AHEAD 8

static __device__ inline double square_of(float value) {
    return (double)value * (double)value;
}

// The rule of a pass that needs none.
struct NoRule {};

// Each chunk has room for two times SUMS sums. The first ones are those of the mean gradient.
extern "C" __global__ void squares(const Pass<NoRule>* passes, u32 count, double* sums) {
    for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const Operands operands = passes[chunk].operands;
        const float scale = passes[chunk].mean.scale;
        double sum = 0.0;
        u64 at = threadIdx.x;
        for (; at + (READ_AHEAD - 1) * SUMS < operands.length; at += READ_AHEAD * SUMS) {
            float values[READ_AHEAD];
            for (int next = 0; next < READ_AHEAD; ++next) {
                values[next] = operands.gradient(at + next * SUMS) * scale;
            }
            for (int next = 0; next < READ_AHEAD; ++next) {
                sum += square_of(values[next]);
            }
        }
        for (; at < operands.length; at += SUMS) {
            sum += square_of(operands.gradient(at) * scale);
        }
        sums[(u64)chunk * 2 * SUMS + threadIdx.x] = sum;
    }
}

// Sums of the weights, and after them those of the direction.
extern "C" __global__ void squares_of_direction(const Pass<Lamb>* passes, u32 count, double* sums) {
    for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const Operands operands = passes[chunk].operands;
        const Lamb rule = passes[chunk].rule;
        const Mean mean = passes[chunk].mean;
        double of_weights = 0.0;
        double of_direction = 0.0;
        for (u64 at = threadIdx.x; at < operands.length; at += SUMS) {
            float slots[2] = {operands.from[0][at], operands.from[1][at]};
            const float weight = operands.weights[at];
            of_weights += square_of(weight);
            of_direction += square_of(rule.direction(mean, weight, operands.gradient(at), slots));
        }
        double* to = sums + (u64)chunk * 2 * SUMS + threadIdx.x;
        to[0] = of_weights;
        to[SUMS] = of_direction;
    }
}

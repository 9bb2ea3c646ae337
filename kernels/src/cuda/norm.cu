
// Twin of cpu/norm.rs: element i is added to sum i mod SUMS, in the order of i. A block of SUMS
// threads makes the sums of a chunk, each thread one. The host adds them as a tree, and the chunks in
// the order of their numbers.
#define SUMS 16

static __device__ inline double square_of(float value) {
    return (double)value * (double)value;
}

// The rule of a pass that needs none.
struct NoRule {};

// Adds the squares of COUNT elements of the mean gradient. All are read before the first is added,
// so that a thread waits for memory once.
template <int COUNT>
static __device__ inline void add_gradient(float scale, const Operands& operands, u64 at, double& sum) {
    float gradient[COUNT];
    for (int next = 0; next < COUNT; ++next) {
        gradient[next] = operands.gradient(at + next * SUMS);
    }
    for (int next = 0; next < COUNT; ++next) {
        sum += square_of(gradient[next] * scale);
    }
}

// Each chunk has room for two times SUMS sums. These are the first ones.
extern "C" __global__ void squares(const Pass<NoRule>* passes, u32 count, double* sums) {
    static_assert(sizeof(Pass<NoRule>) == 144, "the table of launch.rs");
    for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const Operands operands = passes[chunk].operands;
        const float scale = passes[chunk].mean.scale;
        double sum = 0.0;
        u64 at = threadIdx.x;
        for (; at + 15 * SUMS < operands.length; at += 16 * SUMS) {
            add_gradient<16>(scale, operands, at, sum);
        }
        for (; at < operands.length; at += SUMS) {
            add_gradient<1>(scale, operands, at, sum);
        }
        sums[(u64)chunk * 2 * SUMS + threadIdx.x] = sum;
    }
}

// Sums of squares of the weights and of the direction.
struct Sums {
    double of_weights;
    double of_direction;
};

template <int COUNT>
static __device__ inline void add_direction(const Lamb& rule, const Mean& mean, const Operands& operands,
                                            u64 at, Sums& sums) {
    float weights[COUNT];
    float gradient[COUNT];
    float slots[COUNT][2];
    for (int next = 0; next < COUNT; ++next) {
        weights[next] = operands.weights[at + next * SUMS];
        gradient[next] = operands.gradient(at + next * SUMS);
        slots[next][0] = operands.from[0][at + next * SUMS];
        slots[next][1] = operands.from[1][at + next * SUMS];
    }
    for (int next = 0; next < COUNT; ++next) {
        const float direction = rule.direction(mean, weights[next], gradient[next], slots[next]);
        sums.of_weights += square_of(weights[next]);
        sums.of_direction += square_of(direction);
    }
}

// Sums of the weights, and after them those of the direction.
extern "C" __global__ void squares_of_direction(const Pass<Lamb>* passes, u32 count, double* sums) {
    for (u32 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const Operands operands = passes[chunk].operands;
        const Lamb rule = passes[chunk].rule;
        const Mean mean = passes[chunk].mean;
        Sums found = {0.0, 0.0};
        u64 at = threadIdx.x;
        for (; at + 3 * SUMS < operands.length; at += 4 * SUMS) {
            add_direction<4>(rule, mean, operands, at, found);
        }
        for (; at < operands.length; at += SUMS) {
            add_direction<1>(rule, mean, operands, at, found);
        }
        double* to = sums + (u64)chunk * 2 * SUMS + threadIdx.x;
        to[0] = found.of_weights;
        to[SUMS] = found.of_direction;
    }
}

// What every kernel for a device shares: the mean of a gradient, and the pass over a chunk.
//
// NVRTC compiles this text for a device, and tests compile it with the host's C++ compiler. So it
// includes no header. Each file beside this one is the twin of the file of its name in `cpu/`.
//
// Always true here: an operation rounds once, as IEEE 754 defines, and in the order of the twin.
// The options of both compilers forbid fused multiply-add, approximate division and flushed
// subnormals. A launch has any number of threads: a result does not depend on it.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Slots of the rule that has the most.
#define SLOTS_MAX 3

// Each element of a chunk, in one of the launch's threads.
#define EACH(at, length) \
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < (length); at += (u64)gridDim.x * blockDim.x

static __device__ inline u32 bits_of(float value) {
    union {
        float value;
        u32 bits;
    } both;
    both.value = value;
    return both.bits;
}

static __device__ inline float float_of(u32 bits) {
    union {
        float value;
        u32 bits;
    } both;
    both.bits = bits;
    return both.value;
}

static __device__ inline float abs_of(float value) {
    return float_of(bits_of(value) & 0x7fffffffu);
}

// The size of `value` with the sign of `sign`.
static __device__ inline float with_sign_of(float value, float sign) {
    return float_of((bits_of(value) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

// `other` when one of them is no number or both are zero.
static __device__ inline float max_of(float value, float other) {
    return value > other ? value : other;
}

// Twin of `Mean` in cpu/mean.rs.
struct Mean {
    float scale;
    float clip;
    float weight_decay;

    // sum * scale * clip + weight_decay * w, each operation rounded.
    __device__ float of(float weight, float sum) const { return only(sum) + weight_decay * weight; }

    // sum * scale * clip.
    __device__ float only(float sum) const { return sum * scale * clip; }
};

// Twin of `interpolate` in cpu/mean.rs: from `start` to `end`, computed from the nearer one.
static __device__ inline float interpolate(float start, float end, float share) {
    if (share < 0.5f) {
        return start + share * (end - start);
    }
    return end - (end - start) * (1.0f - share);
}

// What one pass of a rule reads and writes: chunks of `length` values. The gradient is `left`, or
// the sum of `left` and `right` if there is a `right`. A slot is read at one place and written at
// another, which may be the same.
struct Pass {
    u64 length;
    const float* weights;
    const float* left;
    const float* right;
    const float* from[SLOTS_MAX];
    float* to[SLOTS_MAX];
    float* next;

    __device__ float gradient(u64 at) const {
        return right ? left[at] + right[at] : left[at];
    }
};

template <class Rule>
static __device__ inline void apply(const Rule& rule, const Mean& mean, const Pass& pass) {
    for (EACH(at, pass.length)) {
        float slots[SLOTS_MAX];
        for (int slot = 0; slot < Rule::SLOTS; ++slot) {
            slots[slot] = pass.from[slot][at];
        }
        const float next = rule.update(mean, pass.weights[at], pass.gradient(at), slots);
        for (int slot = 0; slot < Rule::SLOTS; ++slot) {
            pass.to[slot][at] = slots[slot];
        }
        pass.next[at] = next;
    }
}

// The kernel NAME of a rule.
#define RULE(NAME, ...) \
    extern "C" __global__ void NAME(__VA_ARGS__ rule, Mean mean, Pass pass) { apply(rule, mean, pass); }

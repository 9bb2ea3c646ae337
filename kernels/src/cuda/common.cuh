// What every kernel for a device shares: the mean of a gradient, and the pass over a chunk.
//
// NVRTC compiles this text for a device, and tests compile it with the host's C++ compiler. So it
// includes no header. Each file beside this one is the twin of the file of its name in `cpu/`.
//
// Always true here: an operation rounds once, as IEEE 754 defines, and in the order of the twin.
// The options of both compilers forbid fused multiply-add, approximate division and flushed
// subnormals. A launch has any number of threads: a result does not depend on it.

typedef unsigned char u8;
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

// What a pass reads and writes: memory of `length` values. The gradient is `left`, or the sum of
// `left` and `right` if there is a `right`. A slot is read at one place and written at another,
// which may be the same.
struct Operands {
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

    // Whether several values can be read and written at once.
    __device__ bool are_aligned() const {
        u64 bits = (u64)weights | (u64)left | (u64)right | (u64)next;
        for (int slot = 0; slot < SLOTS_MAX; ++slot) {
            bits = bits | (u64)from[slot] | (u64)to[slot];
        }
        return bits % 16 == 0;
    }
};

// Bytes of the rule that has the most scalars.
#define RULE_BYTES 40

// What a rule does to one chunk. A launch has a table of passes, in memory of the device.
template <class Rule>
struct Pass {
    Operands operands;
    union {
        Rule rule;
        u64 room[RULE_BYTES / 8];
    };
    Mean mean;
    u32 unused;
};

// Values beside each other that are read and written at once. Each of them is computed alone.
template <int WIDTH>
struct alignas(WIDTH * sizeof(float)) Lanes {
    float of[WIDTH];
};

// Applies a rule to a group of WIDTH values, by its number. All are read before the first is needed,
// so that a thread waits for memory once. NVRTC makes one store of a group because its address is a
// multiple of the group's size: with the number of its first value it made four.
template <int WIDTH, class Rule>
static __device__ inline void apply_to(const Rule& rule, const Mean& mean, const Operands& operands,
                                       u64 group) {
    typedef Lanes<WIDTH> Group;
    const Group weights = ((const Group*)operands.weights)[group];
    Group gradient = ((const Group*)operands.left)[group];
    Group slots[SLOTS_MAX];
    for (int slot = 0; slot < Rule::SLOTS; ++slot) {
        slots[slot] = ((const Group*)operands.from[slot])[group];
    }
    if (operands.right) {
        const Group right = ((const Group*)operands.right)[group];
        for (int lane = 0; lane < WIDTH; ++lane) {
            gradient.of[lane] = gradient.of[lane] + right.of[lane];
        }
    }
    Group next;
    for (int lane = 0; lane < WIDTH; ++lane) {
        float values[SLOTS_MAX];
        for (int slot = 0; slot < Rule::SLOTS; ++slot) {
            values[slot] = slots[slot].of[lane];
        }
        next.of[lane] = rule.update(mean, weights.of[lane], gradient.of[lane], values);
        for (int slot = 0; slot < Rule::SLOTS; ++slot) {
            slots[slot].of[lane] = values[slot];
        }
    }
    for (int slot = 0; slot < Rule::SLOTS; ++slot) {
        ((Group*)operands.to[slot])[group] = slots[slot];
    }
    ((Group*)operands.next)[group] = next;
}

// Values that a thread works on at once, if they are aligned.
#define WIDE 4

// Values of a chunk that a block works on at a time.
#define TILE 2048

// Applies a rule to `count` chunks, the longest of which has `tiles` tiles.
template <class Rule>
static __device__ inline void apply(const Pass<Rule>* passes, u32 count, u32 tiles) {
    static_assert(sizeof(Pass<Rule>) == 144, "the table of launch.rs");
    for (u64 turn = blockIdx.x; turn < (u64)count * tiles; turn += gridDim.x) {
        const Pass<Rule>& pass = passes[turn / tiles];
        const Operands operands = pass.operands;
        const Rule rule = pass.rule;
        const Mean mean = pass.mean;
        const u64 begin = turn % tiles * TILE;
        if (begin >= operands.length) {
            continue;
        }
        const u64 end = operands.length - begin < TILE ? operands.length : begin + TILE;
        const u64 wide = operands.are_aligned() ? begin + (end - begin) / WIDE * WIDE : begin;
        for (u64 group = begin / WIDE + threadIdx.x; group < wide / WIDE; group += blockDim.x) {
            apply_to<WIDE>(rule, mean, operands, group);
        }
        for (u64 at = wide + threadIdx.x; at < end; at += blockDim.x) {
            apply_to<1>(rule, mean, operands, at);
        }
    }
}

// The kernel NAME of a rule.
#define RULE(NAME, ...) \
    extern "C" __global__ void NAME(const Pass<__VA_ARGS__>* passes, u32 count, u32 tiles) { \
        apply(passes, count, tiles); \
    }

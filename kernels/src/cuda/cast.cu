
// Twin of cpu/cast.rs: the 16-bit wire types, from and to the bits of an f32.
struct Bf16 {
    static __device__ u16 narrow(u32 bits) {
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        // The bits that are cut off may be all that makes it no number.
        const u32 quiet = (bits >> 16) | 0x40u;
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return (u16)(is_nan ? quiet : rounded);
    }

    static __device__ u32 widen(u16 half) {
        const u32 bits = (u32)half << 16;
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return bits | (u32)is_nan << 22;
    }
};

struct F16 {
    static __device__ u16 narrow(u32 bits) {
        const u32 rebias = (127u - 15u) << 23;
        const u32 sign = (bits >> 16) & 0x8000u;
        const u32 size = bits & 0x7fffffffu;
        // Rounds on its 13 bits that do not fit; a carry into the exponent is right.
        const u32 normal = (size - rebias + 0xfffu + ((size >> 13) & 1u)) >> 13;
        // An addition rounds at 2^-24, the last bit of an f32 at 1/2.
        const u32 tiny = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
        const u32 quiet = 0x7e00u | ((size >> 13) & 0x3ffu);
        const u32 number = size < (127u - 14u) << 23 ? tiny : normal;
        const u32 large = size > 0x7f800000u ? quiet : 0x7c00u;
        return (u16)(sign | (size >= (127u + 16u) << 23 ? large : number));
    }

    static __device__ u32 widen(u16 half) {
        const u32 rebias = (127u - 15u) << 23;
        const u32 sign = (u32)(half & 0x8000u) << 16;
        const u32 size = (u32)(half & 0x7fffu) << 13;
        const u32 normal = size + rebias;
        // The fraction counts in units of 2^-24.
        const u32 unit = (127u - 14u) << 23;
        const u32 tiny = bits_of(float_of(size | unit) - float_of(unit));
        const bool is_nan = size > 0x1fu << 23;
        const u32 large = (normal + rebias) | (u32)is_nan << 22;
        const u32 number = size < 1u << 23 ? tiny : normal;
        return sign | (size >= 0x1fu << 23 ? large : number);
    }
};

template <class Narrow>
static __device__ inline float rounded(float value) {
    return float_of(Narrow::widen(Narrow::narrow(bits_of(value))));
}

// The kernels of a 16-bit type. What is rounded may lie where its source lies.
#define CASTS(NAME, NARROW)                                                                             \
    extern "C" __global__ void sum_##NAME(const float* left, const float* right, float* to, u64 length) { \
        for (EACH(at, length)) {                                                                        \
            to[at] = rounded<NARROW>(left[at] + right[at]);                                             \
        }                                                                                               \
    }                                                                                                   \
    extern "C" __global__ void round_##NAME(const float* from, float* to, u64 length) {                 \
        for (EACH(at, length)) {                                                                        \
            to[at] = rounded<NARROW>(from[at]);                                                         \
        }                                                                                               \
    }                                                                                                   \
    extern "C" __global__ void encode_##NAME(const float* values, u16* encoded, u64 length) {           \
        for (EACH(at, length)) {                                                                        \
            encoded[at] = NARROW::narrow(bits_of(values[at]));                                          \
        }                                                                                               \
    }                                                                                                   \
    extern "C" __global__ void decode_##NAME(const u16* encoded, float* values, u64 length) {           \
        for (EACH(at, length)) {                                                                        \
            values[at] = float_of(NARROW::widen(encoded[at]));                                          \
        }                                                                                               \
    }

CASTS(bf16, Bf16)
CASTS(f16, F16)

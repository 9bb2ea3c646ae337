
// Gives every element one value, whose bits are given.
extern "C" __global__ void fill(u32 bits, u32* to, u64 length) {
    for (EACH(at, length)) {
        to[at] = bits;
    }
}

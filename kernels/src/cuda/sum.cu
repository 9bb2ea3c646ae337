
// Twin of cpu/sum.rs. The sum may lie where one of the two lies.
extern "C" __global__ void sum(const float* left, const float* right, float* to, u64 length) {
    for (EACH(at, length)) {
        to[at] = left[at] + right[at];
    }
}

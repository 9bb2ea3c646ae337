
// Twin of cpu/state.rs.
extern "C" __global__ void mean(const float* sum, float count, float* next, u64 length) {
    for (EACH(at, length)) {
        next[at] = sum[at] / count;
    }
}

// The larger counters may lie where one of the two lies.
extern "C" __global__ void largest(const i64* left, const i64* right, i64* to, u64 length) {
    for (EACH(at, length)) {
        to[at] = left[at] > right[at] ? left[at] : right[at];
    }
}

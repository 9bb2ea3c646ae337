// Twin of cpu/levels.rs. No number is computed here: all floats come out of the tables.
#define LEVELS 256

// Bytes beside each other that are read at once.
struct alignas(WIDE) Bytes {
    u8 of[WIDE];
};

// `count` tables of 256 floats. The first `run` bytes have the first table. The first table follows
// the last one. A group of bytes has one table if a run is whole groups and the bytes are aligned.
extern "C" __global__ void look_up(const u8* bytes, const float* tables, u32 count, u64 run, float* to,
                                   u64 length) {
    const bool is_wide = run % WIDE == 0 && (u64)bytes % sizeof(Bytes) == 0 &&
                         (u64)to % sizeof(Lanes<WIDE>) == 0;
    const u64 wide = is_wide ? length / WIDE * WIDE : 0;
    for (EACH(group, wide / WIDE)) {
        const float* table = tables + group * WIDE / run % count * LEVELS;
        const Bytes from = ((const Bytes*)bytes)[group];
        Lanes<WIDE> levels;
        for (int lane = 0; lane < WIDE; ++lane) {
            levels.of[lane] = table[from.of[lane]];
        }
        ((Lanes<WIDE>*)to)[group] = levels;
    }
    for (EACH(rest, length - wide)) {
        const u64 at = wide + rest;
        to[at] = tables[at / run % count * LEVELS + bytes[at]];
    }
}


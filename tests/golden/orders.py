"""Golden orders of records, from their definition alone: `proto::plan` must agree.

    python tests/golden/orders.py

writes `orders.json` beside this file, for `proto/src/plan/golden.rs`: for each case the record at every position of an epoch. `window` is
written down here in another way than in the program: it makes whole lists.
"""

import json
from pathlib import Path

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z):
    """SplitMix64's output function."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def key(seed, purpose, position):
    state = mix(seed ^ GOLDEN)
    for byte in purpose.encode():
        state = (mix(state ^ byte) + GOLDEN) & MASK
    return mix(state ^ mix((position + GOLDEN) & MASK))


def permuted(items, key):
    """`items` in the order of the keyed permutation: a Feistel network of twelve rounds, repeated until it is inside."""
    count = len(items)
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1

    def at(position):
        while True:
            left, right = position >> half, position & mask
            for number in range(12):
                left, right = right, left ^ (mix(right ^ mix(key ^ number)) & mask)
            position = left << half | right
            if position < count:
                return position

    return [items[at(position)] for position in range(count)]


def records(shards, seed, epoch):
    return permuted(list(range(sum(shards))), key(seed, "order", epoch))


def window(shards, seed, epoch, micro, window, interleave):
    begins = [sum(shards[:at]) for at in range(len(shards))]
    files = [list(range(begin, begin + length)) for begin, length in zip(begins, shards) if length > 0]
    files = permuted(files, key(seed, "shards", epoch))
    lanes = [sum(files[lane::interleave], []) for lane in range(min(interleave, len(files)))]
    of_epoch = key(seed, "window", epoch)
    for number, lane in enumerate(lanes):
        of_lane = key(of_epoch, "lane", number)
        cut = [lane[begin:begin + window] for begin in range(0, len(lane), window)]
        lanes[number] = sum((permuted(part, key(of_lane, "window", at)) for at, part in enumerate(cut)), [])
    order = []
    for turn in range(max(len(lane) for lane in lanes) // micro):
        for lane in lanes:
            part = lane[turn * micro:(turn + 1) * micro]
            order += part if len(part) == micro else []
    for lane in lanes:
        order += lane[len(lane) // micro * micro:]
    return order


def main():
    cases = []
    for shards, seed, epoch in [([10], 0, 0), ([7, 5], 3, 2), ([100], 2**64 - 1, 1)]:
        cases.append({"shards": shards, "seed": seed, "epoch": epoch, "order": records(shards, seed, epoch)})
    for shards, seed, epoch, micro, size, interleave in [
        ([5, 4], 0, 0, 2, 100, 2),
        ([13, 0, 7, 30, 1], 7, 3, 4, 5, 3),
        ([40, 40, 40, 40], 11, 0, 8, 16, 2),
        ([9], 1, 1, 2, 4, 16),
    ]:
        settings = {"micro": micro, "window": size, "interleave": interleave}
        order = window(shards, seed, epoch, **settings)
        assert sorted(order) == list(range(sum(shards)))
        cases.append({"shards": shards, "seed": seed, "epoch": epoch, "order": order} | settings)
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("orders.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

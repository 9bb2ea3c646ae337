"""Golden numbers for 16-bit exchange: PyTorch 2.11 rounds, `kernels::cpu::cast` must agree.

    pip install torch==2.11.0 numpy && python tests/golden/wire.py

writes `wire.json` beside this file, for `kernels/src/cpu/cast/tests.rs`: rows of the bits of an f32 and of what
`.to(torch.bfloat16)` and `.to(torch.float16)` make of it. The f32 are special values, the middles between two neighbours of either type
with the f32 just above and below (where rounding is decided), and random bits. What is not a number is told by null: its bits differ from
kernel to kernel.
"""

import json
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


def between(halves, dtype):
    """The middle between each of these 16-bit patterns and the next, with its f32 neighbours."""
    pair = [torch.tensor((halves + more).astype(np.int16)).view(dtype).double().numpy() for more in (0, 1)]
    middle = ((pair[0] + pair[1]) / 2).astype(np.float32).view(np.uint32)
    return np.concatenate([middle - 1, middle, middle + 1])


random = np.random.default_rng(16)
special = [0, 1, 0x7F, 0x80, 0x8000, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001,
           0x7FC00000, 0x7FFFFFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000]
special = np.array(special, np.uint32)
bits = np.concatenate([
    special, special | 0x80000000,
    between(random.integers(0, 0x7F00, 60), torch.bfloat16),
    between(np.concatenate([np.arange(8), np.arange(0x3FC, 0x404), random.integers(0, 0x7BFF, 60)]), torch.float16),
    random.integers(0, 2**32, 200).astype(np.uint32),
    # Of the size of gradients.
    (random.standard_normal(100) * 10.0 ** random.integers(-9, 6, 100)).astype(np.float32).view(np.uint32),
]).astype(np.uint32)
values = torch.tensor(bits.view(np.int32)).view(torch.float32)


def rounded(dtype):
    halves = values.to(dtype)
    return [None if bad else int(half) & 0xFFFF for half, bad in zip(halves.view(torch.int16), halves.isnan())]


rows = zip((int(each) for each in bits), rounded(torch.bfloat16), rounded(torch.float16))
text = ",\n".join(json.dumps(row) for row in rows)
(HERE / "wire.json").write_text(f"[\n{text}\n]\n")

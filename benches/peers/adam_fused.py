"""Steps of `torch.optim.Adam(fused=True)` on the CPU: one tensor, its gradient in memory.

    echo 2 | python benches/peers/adam_fused.py 67108864      2 threads, 64 million parameters

Each line of input is a number of threads, and takes a few steps with it: `{"threads": .., "seconds": [..]}`, one number for each.
"""

import sys

import common
import torch

STEPS = 3


def main():
    weights = torch.full((int(sys.argv[1]),), 0.5, requires_grad=True)
    weights.grad = torch.linspace(-0.5, 0.5, weights.numel())
    optimizer = torch.optim.Adam([weights], lr=1e-3, fused=True)
    optimizer.step()

    def measure(line):
        threads = int(line)
        torch.set_num_threads(threads)
        optimizer.step()
        return {"threads": threads, "seconds": [common.seconds_of(optimizer.step, 1) for _ in range(STEPS)]}

    common.serve(measure)


if __name__ == "__main__":
    main()

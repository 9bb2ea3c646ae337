"""Steps of `torch.optim.Adam(fused=True)`: one tensor, its gradient in memory.

    echo 2 | python benches/peers/adam_fused.py 67108864 cpu      2 threads, 64 million parameters
    echo 1 | python benches/peers/adam_fused.py 1073741824 cuda:0

Each line of input is a number of threads, and takes a few steps with it: `{"threads": .., "seconds": [..]}`, one number for each.
"""

import sys

import common
import torch

STEPS = 3


def main():
    device = torch.device(sys.argv[2])
    weights = torch.full((int(sys.argv[1]),), 0.5, device=device, requires_grad=True)
    weights.grad = torch.linspace(-0.5, 0.5, weights.numel(), device=device)
    optimizer = torch.optim.Adam([weights], lr=1e-3, fused=True)

    def step():
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()

    def measure(line):
        threads = int(line)
        torch.set_num_threads(threads)
        step()
        return {"threads": threads, "seconds": [common.seconds_of(step, 1) for _ in range(STEPS)]}

    common.serve(measure)


if __name__ == "__main__":
    main()

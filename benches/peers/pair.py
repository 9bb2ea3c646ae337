"""Two PyTorch processes of one thread each, which train one network.

    echo | python benches/peers/pair.py silent convnet MNIST_FOLDER      two that do not talk: what the machine can do
    echo | python benches/peers/pair.py ddp convnet MNIST_FOLDER         DistributedDataParallel over gloo

Each line of input measures one window, of about SECONDS (3): `{"samples_per_second": .., "steps": ..}`, samples of both.
"""

import argparse
import math
import os
import socket

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch_common

PROCESSES = 2


def work(rank, port, args, pipe):
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    model = torch_common.network(args.network)
    if args.peer == "ddp":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = torch_common.trainer(model, args.data, rank)
    common.seconds_of(step, common.WARMUP_STEPS)
    took = torch.tensor(common.seconds_of(step, common.WARMUP_STEPS))
    if args.peer == "ddp":
        # Both must take the same number of steps.
        dist.all_reduce(took, dist.ReduceOp.MAX)
    steps = max(common.WARMUP_STEPS, math.ceil(args.seconds / took.item() * common.WARMUP_STEPS))
    pipe.send(None)
    while pipe.recv():
        pipe.send((steps, common.seconds_of(step, steps)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["silent", "ddp"])
    parser.add_argument("network", choices=torch_common.NETWORKS)
    parser.add_argument("data")
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(PROCESSES):
        ours, theirs = start.Pipe()
        processes.append(start.Process(target=work, args=(rank, port, args, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()

    def measure(_):
        for pipe in pipes:
            pipe.send(True)
        taken = [pipe.recv() for pipe in pipes]
        rate = sum(steps * common.BATCH / seconds for steps, seconds in taken)
        return {"samples_per_second": rate, "steps": taken[0][0]}

    common.serve(measure)
    for pipe in pipes:
        pipe.send(False)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()

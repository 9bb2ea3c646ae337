"""One process that trains a network with a plain PyTorch loop, or with the same loop as a part of a job.

    echo 40 | python benches/peers/loop.py plain convnet
    echo 40 | python benches/peers/loop.py join mlp

Each line of input is a window of so many steps, with a new model: `{"samples_per_second": .., "first": ..}`,
without its first steps and with all of them. A window ends when the last batch is there. Both loops take their
records from the same `DataLoader`, and compute with one thread. The plain one has its fused optimizer.

    ebb run benches/peers/loop.py --workers 2 -- join convnet 40      one window, without input
    python benches/peers/loop.py ddp convnet 40                       two processes of DDP: the times of their batches
"""

import importlib.util
import json
import math
import os
import pathlib
import socket
import sys
import time

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch_common
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

RESNET = pathlib.Path(__file__).resolve().parents[2] / "examples/imagenet/model.py"

# Processes of DDP.
PROCESSES = 2

# Steps of a window that its steady rate leaves out.
WARMUP = 5
RECORDS = 9984


def resnet18():
    """11 million parameters, for 20 classes of images of 64x64 pixels."""
    spec = importlib.util.spec_from_file_location("resnet", RESNET)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ResNet(18, 20)


# The network, the shape of a record, the number of classes, and the records of a batch.
NETWORKS = {
    "convnet": (torch_common.Convnet, (1, 28, 28), common.CLASSES, common.BATCH),
    "resnet18": (resnet18, (3, 64, 64), 20, 32),
    "mlp": (torch_common.Mlp, (1, 28, 28), common.CLASSES, common.BATCH),
    "loader": (torch_common.Convnet, (1, 28, 28), common.CLASSES, common.BATCH),
}

# Processes of the loader of the network `loader`, and how long a record of it takes.
LOADERS, SECONDS_PER_RECORD = 4, 0.002


class Late(Dataset):
    """Records that take their time, as those of a remote store do, and compute nothing meanwhile."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, record):
        time.sleep(SECONDS_PER_RECORD)
        return self.records[record]


def records(network, number):
    """As many records of noise. Their content changes no rate."""
    _, shape, classes, _ = NETWORKS[network]
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(number, *shape, generator=generator)
    return TensorDataset(images, torch.randint(classes, (number,), generator=generator))


def batches_of_job(network, steps):
    """Records of the data set and number of epochs of a job of at least so many steps."""
    batch = NETWORKS[network][3]
    per_epoch = min(steps, RECORDS // batch if network != "resnet18" else 32)
    return per_epoch * batch, math.ceil(steps / per_epoch)


def plain(network, steps):
    """Times at which each batch was there."""
    return trained(*parts(network, steps, fused=True))


def trained(model, optimizer, loader, epochs):
    loss_of, stamps = nn.CrossEntropyLoss(), []
    for _ in range(epochs):
        for x, y in loader:
            stamps.append(time.perf_counter())
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return stamps


def join(network, steps, effective=None):
    import ebbflow

    model, optimizer, loader, epochs = parts(network, steps, fused=False)
    loss_of, stamps = nn.CrossEntropyLoss(), []
    with ebbflow.join(model, optimizer, loader, epochs=epochs, effective=effective) as job:
        for epoch in job.epochs():
            for x, y in epoch:
                stamps.append(time.perf_counter())
                job.step(loss_of(model(x), y))
    return stamps


def ddp(rank, port, network, steps):
    """Trains as one of several processes of DistributedDataParallel over gloo, which the first one prints."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    model, optimizer, loader, epochs = parts(network, steps, fused=True)
    batch = loader.batch_size
    shared = records(network, PROCESSES * len(loader.dataset))
    sampler = DistributedSampler(shared, PROCESSES, rank)
    loader = DataLoader(shared, batch_size=batch, sampler=sampler)
    stamps = trained(nn.parallel.DistributedDataParallel(model), optimizer, loader, epochs)
    if rank == 0:
        print(json.dumps(stamps), flush=True)
    dist.destroy_process_group()


def parts(network, steps, fused):
    make, _, _, batch = NETWORKS[network]
    number, epochs = batches_of_job(network, steps)
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM, fused=fused or None
    )
    data, loaders = records(network, number), 0
    if network == "loader":
        data, loaders = Late(data), LOADERS
    return model, optimizer, DataLoader(data, batch_size=batch, shuffle=True, num_workers=loaders), epochs


def rates(stamps, batch):
    """Rates in samples a second. Each stamp but the last one begins a step.

    >>> rates([0.0, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5], 10)
    {'samples_per_second': 20.0, 'first': 12.727272727272727}
    """
    steady = min(WARMUP, len(stamps) // 2)
    rate = lambda since: batch * (len(stamps) - 1 - since) / (stamps[-1] - stamps[since])
    return {"samples_per_second": rate(steady), "first": rate(0)}


def main():
    who, network = sys.argv[1:3]
    batch = NETWORKS[network][3]
    torch.set_num_threads(1)
    if who == "ddp":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        multiprocessing.spawn(ddp, (port, network, int(sys.argv[3])), PROCESSES)
        return
    if len(sys.argv) > 3:
        # Two processes: an update has a batch of each.
        join(network, int(sys.argv[3]), effective=2 * batch)
        return
    window = {"plain": plain, "join": join}[who]
    common.serve(lambda line: rates(window(network, int(line)), batch))


if __name__ == "__main__":
    main()

"""The numerics class of a loop: facts that decide how torch rounds, and results that show it."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any


def numerics(threads: int) -> tuple[str, bytes]:
    """Return the facts, for people, and a hash of the results of fixed operations.

    Two processes with equal facts and results are of one class. Only such processes train one job
    in canonical order. The operations are computed in f32 and under autocast, because a job may
    choose either.
    """
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    facts = f"torch {torch.__version__}, {capability}, {threads} threads"
    hashed = hashlib.sha256()

    def note(*tensors: Any) -> None:
        for tensor in tensors:
            hashed.update(tensor.detach().float().contiguous().numpy().tobytes())

    # A loop may have another default device.
    with torch.enable_grad(), torch.device("cpu"):
        for lower in (None, torch.bfloat16, torch.float16):
            forward = partial(
                torch.autocast, "cpu", lower, enabled=lower is not None, cache_enabled=False
            )
            _operations(torch, note, forward)
    return facts, hashed.digest()


def _operations(torch: Any, note: Any, forward: Any) -> None:
    """Compute the fixed operations, forward in a context of its own, and note their results."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).requires_grad_()

    functional = torch.nn.functional
    for rows, inner, columns in [(7, 65, 33), (64, 784, 128)]:
        one, other = drawn(rows, inner), drawn(inner, columns)
        with forward():
            product = one @ other
            loss = functional.cross_entropy(product, torch.arange(rows) % columns)
        loss.backward()
        note(product, loss, one.grad, other.grad)
    image, kernel = drawn(3, 4, 17, 17), drawn(8, 4, 3, 3)
    with forward():
        pooled = functional.max_pool2d(functional.conv2d(image, kernel), 2)
        normed = functional.batch_norm(pooled, None, None, training=True)
        total = torch.tanh(functional.gelu(normed)).exp().mean() + pooled.square().sum().sqrt()
    total.backward()
    note(pooled, normed, total, image.grad, kernel.grad)

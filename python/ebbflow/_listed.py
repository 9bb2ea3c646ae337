"""The records of a batch with the largest losses, for ``worst`` of :func:`ebbflow.join`.

A record is told as a tuple: its place in the batch, its loss, its label as classes or as values,
its outputs, and its image as a PNG file, or no bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

#: Parts that the function of ``job.evaluate`` may return for it. They are no metrics.
PARTS = ("losses", "images")

#: Longer sides of an image in pixels, of which the first one counts whose file is small enough.
_SIDES = (128, 64)

#: Bytes of a file, at most.
_BYTES = 16 << 10

#: An array of NumPy, which is imported when it is needed.
Array: TypeAlias = Any

_Told: TypeAlias = tuple[int, float, list[int], list[float], list[float], bytes]


def listed(found: Mapping[str, Any], batch: Any, most: int) -> list[_Told]:
    """Return the ``most`` records of a batch with the largest losses, or all, the worst one first.

    Args:
        found: What the user's function returned: ``losses``, and maybe ``outputs``, ``labels`` and
            ``images``. Labels default to the second one of two parts of the batch.
        batch: The batch.
        most: Number of records.

    Raises:
        TypeError: There is no loss for each record, or the images are none.
    """
    count = len(batch.records)
    if "losses" not in found:
        raise TypeError(
            "job.evaluate: `worst` of join lists the records with the largest losses; let the "
            'function return the loss of each record too, as in {"loss": losses.mean(), "losses": '
            "losses}"
        )
    losses = _array(found["losses"])
    if losses is None or losses.size != count:
        shape = None if losses is None else losses.shape
        raise TypeError(f"job.evaluate: losses: expected {count} numbers, found the shape {shape}")
    labels = _rows(found["labels"] if "labels" in found else _labels_of(batch), count)
    outputs = _rows(found.get("outputs"), count)
    images = None if found.get("images") is None else _pixels(found["images"], count)
    told: list[_Told] = []
    for at in _order(losses.reshape(-1).tolist(), batch.records)[:most]:
        label = [] if labels is None else labels[at].tolist()
        classes = labels is not None and labels.dtype.kind in "iub"
        told.append(
            (
                at,
                float(losses.reshape(-1)[at]),
                [int(number) for number in label] if classes else [],
                [] if classes else [float(number) for number in label],
                [] if outputs is None else [float(number) for number in outputs[at]],
                b"" if images is None else _small(images[at]),
            )
        )
    return told


def _order(losses: Sequence[float], records: Sequence[int]) -> list[int]:
    """Return the places, the worst one first, as the master orders them: NaN before all."""

    def key(at: int) -> tuple[bool, float, int]:
        loss = losses[at]
        return (not math.isnan(loss), 0.0 if math.isnan(loss) else -loss, records[at])

    return sorted(range(len(losses)), key=key)


def _labels_of(batch: Any) -> Any:
    """Return the labels of a batch of pairs, and ``None`` for another one."""
    try:
        return batch.y
    except AttributeError:
        return None


def _array(value: Any) -> Array:
    """Return numbers of any library as an array; ``None`` for what has none."""
    import numpy

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float() if value.is_floating_point() else value
    array = numpy.asarray(value)
    return array if array.dtype.kind in "iubf" else None


def _rows(value: Any, count: int) -> Array:
    """Return a row of numbers for each record; ``None`` for what has none."""
    if value is None or isinstance(value, Mapping | tuple):
        return None
    array = _array(value)
    if array is None or array.ndim == 0 or len(array) != count:
        return None
    return array.reshape(count, -1)


def _pixels(value: Any, count: int) -> Array:
    """Return images as u8 of the shape ``[n, height, width, channels]``."""
    import numpy

    array = _array(value)
    shape: tuple[int, ...] = () if array is None else array.shape
    if array is not None and len(shape) == 3:
        array = array[..., numpy.newaxis]
    elif array is not None and len(shape) == 4 and shape[1] in (1, 3):
        array = numpy.moveaxis(array, 1, -1)
    if array is None or array.ndim != 4 or array.shape[-1] not in (1, 3) or len(array) != count:
        raise TypeError(
            f"job.evaluate: images: expected {count} images with 1 or 3 channels, as "
            "[n, height, width], [n, channels, height, width] or [n, height, width, channels], "
            f"found the shape {shape}"
        )
    if array.dtype == numpy.uint8:
        return array
    # Of floats 0 is black and 1 is white.
    bright = numpy.nan_to_num(numpy.clip(array.astype(numpy.float64), 0, 1))
    return numpy.rint(bright * 255).astype(numpy.uint8)


def _small(image: Array) -> bytes:
    """Return an image as a small PNG file. A file of the last side is small enough."""
    longer = max(image.shape[:2])
    files = (_png(image[:: -(-longer // side), :: -(-longer // side)]) for side in _SIDES)
    return next((file for file in files if len(file) <= _BYTES), b"")


def _png(image: Array) -> bytes:
    height, width, channels = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )

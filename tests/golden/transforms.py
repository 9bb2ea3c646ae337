"""Golden results of transforms, from their definition alone: `data/src/transform` must agree.

    python tests/golden/transforms.py        # needs numpy

writes `transforms.json` beside this file, for `data/src/transform/tests.rs`: for each case a column, the list of transforms as in a job file,
(seed, epoch, record), one record's values, and what the list makes of them, or the error's words. Filters of pixels have golden files of
their own.
"""

import json
import math
from pathlib import Path

import numpy as np
from orders import GOLDEN, MASK, key, mix


class Draws:
    """Uniform numbers of one transform in one record."""

    def __init__(self, seed, epoch, record, column, place):
        self.state = key(key(seed, "transform", epoch), f"{column}/{place}", record)

    def __call__(self):
        self.state = (self.state + GOLDEN) & MASK
        return (mix(self.state) >> 11) / 2**53


def random_crop(image, draw, size, padding=0):
    height, width = size
    image = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top = int(draw() * (image.shape[0] - height + 1))
    left = int(draw() * (image.shape[1] - width + 1))
    return image[top:top + height, left:left + width]


def horizontal_flip(image, draw, p=0.5):
    return image[:, ::-1] if draw() < p else image


def vertical_flip(image, draw, p=0.5):
    return image[::-1] if draw() < p else image


def center_crop(image, draw, size):
    height, width = size
    top, left = round((image.shape[0] - height) / 2.0), round((image.shape[1] - width) / 2.0)
    return image[top:top + height, left:left + width]


def normalize(values, draw, mean, std):
    mean, std = np.float32(mean), np.float32(std)
    if values.dtype == np.uint8 and values.ndim == 3:
        return np.moveaxis((values.astype(np.float32) * np.float32(1 / 255) - mean) / std, 2, 0)
    return (values.astype(np.float32) - mean) / std


def one_hot(values, draw, classes):
    return np.eye(classes, dtype=np.float32)[values]


def log(values, draw, add=0.0):
    return np.float32([math.log(value + add) for value in values.astype(np.float64)])


def clip(values, draw, min=None, max=None):
    return np.clip(values, min, max).astype(values.dtype)


def cast(values, draw, dtype):
    return values.astype({"f32": np.float32, "i32": np.int32}[dtype])


def hashed(data):
    state = key(0, "hash", len(data))
    for begin in range(0, len(data), 8):
        state = key(state, "", int.from_bytes(data[begin:begin + 8], "little"))
    return state


def hash(values, draw, buckets):
    if isinstance(values, str):
        return np.int64(hashed(values.encode()) % buckets)
    return np.int64([hashed(int(value).to_bytes(8, "little", signed=True)) % buckets for value in values])


def vocabulary(values, draw, values_=None, default=None):
    places = {word: place for place, word in enumerate(values_)}
    if isinstance(values, str):
        return np.int64(places.get(values, default))
    return np.int64([places.get(int(value), default) for value in values])


def pad(values, draw, length, value=0, side="end"):
    missing = np.full(max(0, length - len(values)), value, values.dtype)
    if side == "end":
        return np.concatenate([values[:length], missing])
    return np.concatenate([missing, values[max(0, len(values) - length):]])


def main():
    image = (np.arange(5 * 7 * 3) * 37 % 256).astype(np.uint8).reshape(5, 7, 3)
    augment = [
        {"op": "random_crop", "size": [4, 4], "padding": 2},
        {"op": "horizontal_flip"},
        {"op": "vertical_flip", "p": 0.25},
        {"op": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    ]
    column = {"name": "image", "dtype": "u8", "shape": [5, 7, 3]}
    cases = [(column, image, augment, place) for place in [(0, 0, 0), (7, 0, 1), (7, 1, 1), (7, 1, 2), (2**63, 9, 2**40)]]
    cases.append((column, image, [{"op": "center_crop", "size": [2, 4]}, {"op": "normalize", "mean": 0.5, "std": 2}], (1, 1, 1)))

    def numbers(name, dtype, values, *transforms, ragged=False):
        values = np.asarray(values, dtype)
        kind = {"int64": "i64", "float32": "f32", "float64": "f64", "uint8": "u8", "int32": "i32"}[values.dtype.name]
        shape = [] if ragged else list(values.shape)
        cases.append(({"name": name, "dtype": kind, "shape": shape, "ragged": ragged}, values, list(transforms), (3, 4, 5)))

    def text(name, value, *transforms):
        cases.append(({"name": name, "dtype": "u8", "shape": [], "ragged": True}, value, list(transforms), (3, 4, 5)))

    numbers("x", np.float64, [0.1, -2.0, 7.5], {"op": "normalize", "mean": [1, 2, 3], "std": 4})
    numbers("x", np.int64, [0, 3, 1], {"op": "one_hot", "classes": 4})
    numbers("x", np.float32, [0.0, 0.5, 100.0], {"op": "log", "add": 1}, {"op": "clip", "max": 2.5})
    numbers("x", np.int64, [-5, 5, 50], {"op": "clip", "min": -1, "max": 9}, {"op": "cast", "dtype": "f32"})
    numbers("x", np.int64, [0, 1, -1, 2**62], {"op": "hash", "buckets": 1000})
    numbers("x", np.int64, [10, 99, 30], {"op": "vocabulary", "values": [30, 20, 10], "default": -100})
    numbers("x", np.int32, [1, 2, 3], {"op": "pad", "length": 5, "value": -1}, ragged=True)
    numbers("x", np.int32, [1, 2, 3], {"op": "pad", "length": 2, "side": "start"}, ragged=True)
    numbers("x", np.float32, [1.5], {"op": "pad", "length": 3, "side": "start", "value": 0.5}, ragged=True)
    text("x", "a word of more than eight bytes", {"op": "hash", "buckets": 97})
    text("x", "", {"op": "hash", "buckets": 97})
    text("x", "größer", {"op": "vocabulary", "values": ["kleiner", "größer"]})

    lines = []
    for column, values, transforms, (seed, epoch, record) in cases:
        result = values
        for place, transform in enumerate(transforms):
            options = {("values_" if name == "values" else name): value for name, value in transform.items() if name != "op"}
            result = globals()[transform["op"]](result, Draws(seed, epoch, record, column["name"], place), **options)
        given = values if isinstance(values, str) else values.ravel().tolist()
        lines.append(json.dumps({
            "column": column, "values": given, "transforms": transforms, "seed": seed, "epoch": epoch, "record": record,
            "shape": list(result.shape), "result": [float(value) for value in result.ravel()],
        }, ensure_ascii=False))
    Path(__file__).with_name("transforms.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

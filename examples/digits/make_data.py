"""Writes the digits of this example as idx files, `images.idx3.gz` and `labels.idx1.gz`, beside this script.

    pip install scikit-learn==1.9.1 && python examples/digits/make_data.py

The source is the copy of the UCI data set that scikit-learn carries, so nothing is downloaded. The files are the same
bytes each time: gzip's time stamp is 0.
"""

import gzip
import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write(name, array):
    """idx: two zeros, 8 for bytes, the number of dimensions; their sizes, big-endian; the values."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    Path(__file__).with_name(name).write_bytes(gzip.compress(data, mtime=0))


digits = load_digits()
write("images.idx3.gz", digits.images)
write("labels.idx1.gz", digits.target)

"""Tokens and tables: the input pipeline of Ebbflow beside a plain loop and beside pyarrow, on one core.

    python benches/columns.py EBB FOLDER [--rounds N]        # needs numpy and pyarrow

writes 256 MiB of tokens of each width, and Parquet files of 20 columns with 2,000,000 rows, below FOLDER. Files are in the memory of the
system before anything is timed. `EBB` is a release build of `ebb`; `ebb data bench` measures it, with its order of records and its batches.

- Tokens: u16 becomes i32, u32 becomes i64, and labels become i64, the type of classes, in blocks of 1,024. The plain loop is numpy's copy of
  the same values, from the mapped file into memory of the wider type that it uses again, in the order of the file.
- Parquet: pyarrow has three ways to contiguous columns (whole table, row group by row group, batch by batch), each without threads. The best
  one of each round counts. Each pass of Ebbflow decodes the file, because `--data-memory` is below its size.

The peers keep the order of the file, so rows with a target have `shuffle = "none"`. Those with a shuffle (`records` for tokens, `window` with
the rows of a row group for Parquet) have no target.

Each ratio compares neighbouring measurements of one round, so a change of the machine's speed cancels. The rows are in FOLDER/columns.rows.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
from report import row

SECONDS = 4
BLOCK = 1024
MICRO = 64
TOKENS = 256 << 20
ROWS, GROUP = 2_000_000, 131_072
CODECS = ("zstd", "snappy")
WIDER = {"u16": np.int32, "u32": np.int64}
HEAD = """
name = "columns"
epochs = 1
[model]
builtin = "softmax"
[optimizer]
kind = "sgd"
learning_rate = 0.1
"""
TOKENS_JOB = HEAD + """
[data]
format = "tokens"
train = {{ files = ["{name}.bin"] }}
tokens = {{ dtype = "{name}", block = {block} }}
shuffle = "{shuffle}"
[batch]
micro = {micro}
"""
TABLE_JOB = HEAD + """
[data]
format = "parquet"
train = {{ files = ["{codec}.parquet"] }}
inputs = [{inputs}]
label = "y"
shuffle = "{shuffle}"
{window}
[batch]
micro = 4096
"""


def write(folder):
    random = np.random.default_rng(4)
    folder.mkdir(parents=True, exist_ok=True)
    for name in WIDER:
        dtype = np.dtype(name.replace("u", "<u").replace("16", "2").replace("32", "4"))
        random.integers(0, 50_257, TOKENS // dtype.itemsize, dtype=dtype).tofile(folder / f"{name}.bin")
        for shuffle in ("none", "records"):
            (folder / f"{name}-{shuffle}.toml").write_text(TOKENS_JOB.format(name=name, block=BLOCK, micro=MICRO, shuffle=shuffle))
    columns = {f"f{at}": random.normal(size=ROWS).astype(np.float32) for at in range(12)}
    columns |= {f"i{at}": random.integers(0, 100_000, ROWS) for at in range(7)}
    columns["y"] = random.integers(0, 2, ROWS)
    inputs = ", ".join(f'"{name}"' for name in columns if name != "y")
    windows = f"window = {GROUP}\ninterleave = 1"
    for codec in CODECS:
        parquet.write_table(pyarrow.table(columns), folder / f"{codec}.parquet", row_group_size=GROUP, compression=codec)
        for shuffle, window in (("none", ""), ("window", windows)):
            job = TABLE_JOB.format(codec=codec, inputs=inputs, shuffle=shuffle, window=window)
            (folder / f"{codec}-{shuffle}.toml").write_text(job)


def rate(passes):
    """Values for each second; `passes` gives how many values each pass had."""
    count, begin = 0, time.perf_counter()
    for values in passes:
        count += values
        if time.perf_counter() - begin > SECONDS:
            return count / (time.perf_counter() - begin)


def plain_loop(folder, name):
    """Widens tokens and labels, as the pipeline does."""
    values = np.memmap(folder / f"{name}.bin", dtype=name.replace("u", "uint"), mode="r")
    tokens = np.empty(MICRO * BLOCK, WIDER[name])
    labels = np.empty(len(tokens), np.int64)
    while True:
        for at in range(0, len(values) - len(tokens) - 1, len(tokens)):
            np.copyto(tokens, values[at:at + len(tokens)], casting="safe")
            np.copyto(labels, values[at + 1:at + 1 + len(labels)], casting="safe")
            yield 2 * len(tokens)


def whole_table(path):
    while True:
        table = parquet.read_table(path, use_threads=False)
        yield sum(len(column.combine_chunks().to_numpy(zero_copy_only=False)) for column in table.columns)


def row_groups(path):
    while True:
        file = parquet.ParquetFile(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            yield sum(len(column.combine_chunks().to_numpy(zero_copy_only=False)) for column in table.columns)


def batches(path):
    while True:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=4096, use_threads=False):
            yield sum(len(column.to_numpy(zero_copy_only=False)) for column in batch.columns)


def ours(ebb, job, values):
    """Values for each second of the whole pipeline; a record has so many values."""
    command = [ebb, "data", "bench", job, "--data-threads", "1", "--data-memory", "32MiB", "--seconds", str(2 * SECONDS), "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return values * json.loads(found)["records_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ebb", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pyarrow.set_cpu_count(1)
    folder, ebb = args.folder.resolve(), args.ebb.resolve()
    if not (folder / "snappy-window.toml").exists():
        write(folder)
    for path in folder.iterdir():
        path.read_bytes()
    ratios = collections.defaultdict(list)
    for number in range(1, args.rounds + 1):
        for name, wider in WIDER.items():
            peer = rate(plain_loop(folder, name))
            own, shuffled = (ours(ebb, folder / f"{name}-{shuffle}.toml", 2 * BLOCK) for shuffle in ("none", "records"))
            print(f"round {number}: {name}: loop {peer:.3g}, ours {own:.3g}, shuffled {shuffled:.3g} values/s", file=sys.stderr)
            kind = f"{name} to {np.dtype(wider).name}"
            ratios[f"{kind}, over a plain loop"].append(own / peer)
            ratios[f"{kind} with a shuffle, over a plain loop"].append(shuffled / peer)
        for codec in CODECS:
            ways = [rate(way(folder / f"{codec}.parquet")) for way in (whole_table, row_groups, batches)]
            own, shuffled = (ours(ebb, folder / f"{codec}-{shuffle}.toml", 20) for shuffle in ("none", "window"))
            seen = ", ".join(f"{way:.3g}" for way in ways)
            print(f"round {number}: {codec}: pyarrow {seen}, ours {own:.3g}, shuffled {shuffled:.3g} values/s", file=sys.stderr)
            ratios[f"Parquet with {codec}, over the best way of pyarrow"].append(own / max(ways))
            ratios[f"Parquet with {codec} and a shuffle, over the best way of pyarrow"].append(shuffled / max(ways))
    with open(folder / "columns.rows", "w") as rows:
        for name, values in ratios.items():
            target = None if "shuffle" in name else 1.25 if "Parquet" in name else 0.9
            print(json.dumps(row(name, "ratio", values, 1.0, target)), file=rows)


if __name__ == "__main__":
    main()

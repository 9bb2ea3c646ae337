"""Writes `clicks.parquet`: what 60 users did with 40 items, generated.

    python examples/tabular/make_data.py        # needs numpy and pyarrow

A record is one item that a user saw. Users and items have hidden vectors of length 4. The chance of a
click grows with their scalar product, with the age in one direction and with the hour in another.
"""

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RECORDS, USERS, ITEMS = 12_000, 60, 40


def main():
    random = np.random.default_rng(7)
    users, items = random.normal(size=(USERS, 4)), random.normal(size=(ITEMS, 4))
    user, item = random.integers(0, USERS, RECORDS), random.integers(0, ITEMS, RECORDS)
    age, hour = random.integers(18, 80, RECORDS), random.integers(0, 24, RECORDS)
    score = 2.0 * np.einsum("nd,nd->n", users[user], items[item])
    score += 0.5 * (age - 49) / 18 + 0.5 * np.cos(2 * np.pi * hour / 24)
    clicked = random.random(RECORDS) < 1 / (1 + np.exp(-score))
    table = pa.table({
        "user": pa.array(user, pa.int64()),
        "item": pa.array(item, pa.int32()),
        "age": pa.array(age, pa.uint8()),
        "hour": pa.array(hour, pa.uint8()),
        "clicked": pa.array(clicked, pa.bool_()),
    })
    pq.write_table(table, pathlib.Path(__file__).with_name("clicks.parquet"), row_group_size=4096, compression="zstd")
    print(f"{clicked.mean():.3f} of the records are clicks")


if __name__ == "__main__":
    main()

"""Starts a training of handwritten digits by an estimator: the notebook of SageMaker's users."""

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
from ebbflow.estimator import PyTorch, S3Uploader, TrainingInput

HERE = Path(__file__).resolve().parent

DIGITS = HERE.parents[1] / "digits"

METRICS = [
    {"Name": "val:loss", "Regex": r"val loss: ([0-9.]+);"},
    {"Name": "val:accuracy", "Regex": r"val accuracy: ([0-9.]+);"},
]


def prepare(folder):
    """Write 1,437 images of 8x8 pixels with their digits to train on, and 360 to measure with."""
    images = gzip.decompress((DIGITS / "images.idx3.gz").read_bytes())
    labels = gzip.decompress((DIGITS / "labels.idx1.gz").read_bytes())
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 8, 8).astype(np.float32)
    x = (x / 16 - 0.305) / 0.376
    y = np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)
    for name, part in (("train", slice(1437)), ("val", slice(1437, None))):
        (folder / name).mkdir(parents=True)
        np.savez(folder / name / "digits.npz", x=x[part], y=y[part])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", default="out/estimator", help="path or URL for data and output")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        train_data = S3Uploader.upload(f"{folder}/train", f"{args.place}/data/train")
        val_data = S3Uploader.upload(f"{folder}/val", f"{args.place}/data/val")

    estimator = PyTorch(
        entry_point="train.py",
        source_dir=HERE / "src",
        instance_count=args.instances,
        instance_type="local",
        py_version="py3",
        hyperparameters={"epochs": args.epochs, "batch_size": 32, "lr": 1.0, "gamma": 0.9},
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
        debugger_hook_config=False,
        metric_definitions=METRICS,
        output_path=args.place,
    )
    train = TrainingInput(train_data, content_type="application/x-npz", input_mode="File")
    val = TrainingInput(val_data, content_type="application/x-npz", input_mode="File")
    estimator.fit({"train": train, "val": val})

    print("accuracy:", estimator.latest_training_job.final_metrics["val:accuracy"])
    print("model:", estimator.model_data)


if __name__ == "__main__":
    main()

"""Images for each second: the input pipeline of Ebbflow beside those of PyTorch, on one core.

    python benches/input.py EBB FOLDER [--rounds N]        # needs torch, torchvision, pillow and numpy

writes 400 JPEG files of about 110 KB below FOLDER, and lets each way make 224 x 224 crops of them, normalised, in turn, N times. `EBB` is a
release build of `ebb`. Each ratio compares neighbouring measurements of one round, so a change of the machine's speed cancels. The rows are
in FOLDER/input.rows.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import torch
import torchvision
from PIL import Image
from report import row
from torchvision.transforms import v2

SECONDS = 4
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
JOB = """
name = "input"
epochs = 1
[model]
builtin = "softmax"
[data]
format = "images"
train = { files = ["images"] }
inputs = ["image"]
label = "class"
[data.transforms]
image = [
    { op = "decode" },
    { op = "random_resized_crop", size = 224 },
    { op = "horizontal_flip" },
    { op = "normalize", mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] },
]
[batch]
micro = 16
[optimizer]
kind = "sgd"
learning_rate = 0.1
"""


def write(folder, count=400):
    """Photographs of clouds: noise whose amplitude falls with its frequency."""
    random = np.random.default_rng(3)
    for number in range(count):
        place = folder / "images" / f"class-{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        height, width = 375, 500
        frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]) + 1 / width
        noise = random.normal(size=(3, height, width))
        pixels = np.fft.irfft2(np.fft.rfft2(noise) / frequency, s=(height, width))
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255 + random.normal(0, 6, (3, height, width))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
        image.save(place / f"{number:04}.jpg", quality=93)
    (folder / "job.toml").write_text(JOB)


class Folder(torch.utils.data.Dataset):
    def __init__(self, files, make):
        self.files, self.make = files, make

    def __len__(self):
        return 10 ** 9

    def __getitem__(self, index):
        return self.make(self.files[index % len(self.files)])


def pillow(files):
    change = torchvision.transforms.Compose([
        torchvision.transforms.RandomResizedCrop(224), torchvision.transforms.RandomHorizontalFlip(),
        torchvision.transforms.ToTensor(), torchvision.transforms.Normalize(MEAN, STD)])
    return Folder(files, lambda path: change(Image.open(path).convert("RGB")))


def torchvision_io(files):
    change = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(),
                         v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    return Folder(files, lambda path: change(torchvision.io.decode_jpeg(torchvision.io.read_file(str(path)))))


def rate(batches):
    """Images for each second."""
    count, begin = 0, time.perf_counter()
    for batch in batches:
        count += len(batch)
        if time.perf_counter() - begin > SECONDS:
            return count / (time.perf_counter() - begin)


def loader(dataset):
    return rate(torch.utils.data.DataLoader(dataset, batch_size=16))


def decode_alone(files):
    """libjpeg-turbo's decoder, as torchvision calls it, on bytes in memory."""
    content = [torchvision.io.read_file(str(path)) for path in files]
    return rate([torchvision.io.decode_jpeg(content[at % len(content)])] for at in range(10 ** 9))


def ours(ebb, folder):
    command = [ebb, "data", "bench", folder / "job.toml", "--data-threads", "1", "--seconds", str(2 * SECONDS), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["records_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ebb", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    folder, ebb = args.folder.resolve(), args.ebb.resolve()
    if not (folder / "job.toml").exists():
        write(folder)
    files = sorted((folder / "images").glob("*/*.jpg"))
    ratios = {"DataLoader with Pillow": [], "DataLoader with torchvision.io": [], "libjpeg-turbo's decode alone": []}
    for number in range(args.rounds):
        others = [loader(pillow(files)), loader(torchvision_io(files)), decode_alone(files)]
        own = ours(ebb, folder)
        print(f"round {number + 1}: {', '.join(f'{other:.0f}' for other in others)}; ours {own:.0f} images/s", file=sys.stderr)
        for name, other in zip(ratios, others):
            ratios[name].append(own / other)
    with open(folder / "input.rows", "w") as rows:
        for name, values in ratios.items():
            target = 0.88 if "alone" in name else 1.35
            print(json.dumps(row(f"JPEG to 224 x 224, ours over {name}", "ratio", values, 1.0, target)), file=rows)


if __name__ == "__main__":
    main()

"""Writes folders of generated images, laid out as those of ImageNet: `train/heart/0001.jpg`, `validation/..`.

    python examples/imagenet/make_data.py        # needs numpy and pillow

An image shows one of 20 shapes in a random place, size, rotation and colour, on a background of two
colours, with noise. Its height and width are random too. Equal settings give equal images.
"""

import argparse
import pathlib

import numpy as np
from PIL import Image, ImageDraw

FINER = 4  # Shapes are drawn this many times as large and then made smaller, so that edges are smooth.


def polar(radii):
    """Returns the corners at these distances from the middle, at equal angles."""
    angles = np.arange(len(radii)) * 2 * np.pi / len(radii) - np.pi / 2
    return np.stack([np.cos(angles), np.sin(angles)], 1) * np.array(radii)[:, None]


def round_part(begin, end, radius=1.0, middle=(0.0, 0.0)):
    """Returns points of a circle from one angle to another, in degrees."""
    angles = np.radians(np.linspace(begin, end, 40))
    return np.stack([np.cos(angles), np.sin(angles)], 1) * radius + np.array(middle)


def box(left, top, right, bottom):
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def heart():
    t = np.linspace(0, 2 * np.pi, 80)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([x, -y], 1) / 17


# Each class is a list of polygons between -1 and 1. Even ones are filled, odd ones cut out of those before.
SHAPES = {
    "arrow": [np.array([(-1, -0.25), (0.1, -0.25), (0.1, -0.75), (1, 0), (0.1, 0.75), (0.1, 0.25), (-1, 0.25)])],
    "bar": [box(-1, -0.22, 1, 0.22)],
    "bolt": [np.array([(0.3, -1), (-0.6, 0.2), (-0.05, 0.2), (-0.3, 1), (0.6, -0.3), (0.05, -0.3)])],
    "chevron": [np.array([(-0.6, -1), (0, -1), (0.7, 0), (0, 1), (-0.6, 1), (0.1, 0)])],
    "circle": [round_part(0, 360, 0.9)],
    "comb": [box(-1, -0.6, 1, 0.6), box(-0.65, -0.2, -0.2, 0.6), np.empty((0, 2)), box(0.2, -0.2, 0.65, 0.6)],
    "crescent": [round_part(0, 360), round_part(0, 360, 0.8, (0.45, 0))],
    "cross": [polar([0.4, 1.05, 1.05] * 4)],
    "drop": [np.concatenate([round_part(-20, 200, 0.6, (0, 0.35)), [(0, -1.0)]])],
    "dumbbell": [np.concatenate([round_part(20, 340, 0.45, (-0.6, 0)), round_part(200, 520, 0.45, (0.6, 0))])],
    "flower": [polar(0.7 + 0.3 * np.cos(5 * np.linspace(0, 2 * np.pi, 100, endpoint=False)))],
    "frame": [box(-0.8, -0.8, 0.8, 0.8), box(-0.45, -0.45, 0.45, 0.45)],
    "half": [round_part(0, 180, 1.0, (0, -0.4))],
    "heart": [heart()],
    "hourglass": [np.array([(-0.7, -0.9), (0.7, -0.9), (-0.7, 0.9), (0.7, 0.9)])],
    "ring": [round_part(0, 360), round_part(0, 360, 0.55)],
    "square": [box(-0.75, -0.75, 0.75, 0.75)],
    "star": [polar([1.0, 0.4] * 5)],
    "triangle": [polar([1.0] * 3)],
    "tee": [np.array([(-0.9, -0.8), (0.9, -0.8), (0.9, -0.3), (0.25, -0.3), (0.25, 0.9), (-0.25, 0.9), (-0.25, -0.3), (-0.9, -0.3)])],
}


def mask(random, polygons, height, width):
    """Draws a shape somewhere into an image. Returns its share of each pixel, f32 `[height, width, 1]`."""
    angle = np.radians(random.uniform(-40, 40))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    radius = min(height, width) * random.uniform(0.34, 0.46)
    middle = [random.uniform(0.9 * radius, side - 0.9 * radius) for side in (width, height)]
    drawn = Image.new("L", (width * FINER, height * FINER))
    draw = ImageDraw.Draw(drawn)
    for number, polygon in enumerate(polygons):
        if len(polygon):
            points = (polygon @ turn.T * radius + middle) * FINER
            draw.polygon([tuple(point) for point in points], fill=0 if number % 2 else 255)
    return np.asarray(drawn.resize((width, height), Image.Resampling.BOX), np.float32)[:, :, None] / 255


def picture(random, polygons, side):
    """Returns an image of a shape. Its sides are 1 to 1.5 times as long as `side`."""
    height, width = (int(random.integers(side, side * 3 // 2)) for _ in range(2))
    # One sees the shape everywhere: it is bright, and what is behind it is dark.
    left, right = random.uniform(0, 110, (2, 3))
    colour = random.uniform(130, 255, 3)
    across = np.linspace(0, 1, width)[None, :, None]
    background = left + (right - left) * across
    covered = mask(random, polygons, height, width)
    values = background * (1 - covered) + colour * covered + random.normal(0, 8, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def write(folder, seed, images, side):
    """Writes `images` of each class. An image depends on the seed, its class and its number alone."""
    for number, (name, polygons) in enumerate(sorted(SHAPES.items())):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for image in range(images):
            random = np.random.default_rng([seed, number, image])
            picture(random, polygons, side).save(place / f"{image:04}.jpg", quality=90)


def main():
    parser = argparse.ArgumentParser(description="Writes folders of generated images of 20 shapes.")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent, help="folder for `train` and `validation`")
    parser.add_argument("--train", type=int, default=100, help="training images of each class")
    parser.add_argument("--validation", type=int, default=25, help="validation images of each class")
    parser.add_argument("--side", type=int, default=80, help="least height and width in pixels")
    arguments = parser.parse_args()
    write(arguments.out / "train", 7, arguments.train, arguments.side)
    write(arguments.out / "validation", 8, arguments.validation, arguments.side)
    print(f"{len(SHAPES)} classes, {len(SHAPES) * arguments.train} images to train, {len(SHAPES) * arguments.validation} to validate")


if __name__ == "__main__":
    main()

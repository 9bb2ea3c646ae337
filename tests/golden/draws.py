"""Golden draws of `random_resized_crop` and `color_jitter`, from their definition alone: `data/src/pixels` must agree.

    python tests/golden/draws.py        # needs numpy

writes `draws.json` beside this file, for `data/src/transform/tests.rs`: for each case (seed, epoch, record), column and place of the
transform, and the window of the image or the adjustments in their order. Definitions are those of torchvision's `RandomResizedCrop` and
`ColorJitter`, with the uniform numbers of `transforms.py`.
"""

import json
import math
from pathlib import Path

from transforms import Draws


def between(low, high, draw):
    return low + (high - low) * draw()


def window(draw, height, width, scale, ratio):
    """Return top, left, height and width of the part that is resized."""
    for _ in range(10):
        area = height * width * between(*scale, draw)
        aspect = math.exp(between(math.log(ratio[0]), math.log(ratio[1]), draw))
        columns, rows = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            return [int(draw() * (height - rows + 1)), int(draw() * (width - columns + 1)), rows, columns]
    rows, columns = height, width
    if width / height < min(ratio):
        rows = round(width / min(ratio))
    elif width / height > max(ratio):
        columns = round(height * max(ratio))
    return [(height - rows) // 2, (width - columns) // 2, rows, columns]


def adjustments(draw, **by):
    """Return names and factors in the order in which they are applied."""
    names = ["brightness", "contrast", "saturation", "hue"]
    order = list(range(4))
    for place in range(3):
        other = place + int(draw() * (4 - place))
        order[place], order[other] = order[other], order[place]
    ranges = {name: (max(0.0, 1 - value), 1 + value) for name, value in by.items() if value > 0 and name != "hue"}
    if by.get("hue", 0) > 0:
        ranges["hue"] = (-by["hue"], by["hue"])
    factors = {name: between(*ranges[name], draw) for name in names if name in ranges}
    return [[names[at], factors[names[at]]] for at in order if names[at] in factors]


def main():
    places = [(0, 0, 0), (7, 0, 1), (7, 1, 1), (7, 1, 2), (2**63, 9, 2**40), (3, 2, 77), (3, 2, 78)]
    shapes = [(375, 500), (48, 64), (7, 3), (1, 1), (10, 200), (200, 10)]
    areas = [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.35, 1.0), (0.5, 2.0)), ((0.9, 1.0), (3 / 4, 4 / 3))]
    lines = []
    for number, (seed, epoch, record) in enumerate(places):
        case = {"seed": seed, "epoch": epoch, "record": record, "column": "image", "place": number % 3}
        for height, width in shapes:
            for scale, ratio in areas:
                draw = Draws(seed, epoch, record, "image", number % 3)
                found = window(draw, height, width, scale, ratio)
                lines.append(json.dumps({**case, "image": [height, width], "scale": scale, "ratio": ratio, "window": found}))
        for by in [(0.5, 0.5, 0.5, 0.5), (0.25, 0, 0, 0), (0, 2.0, 0.75, 0), (0, 0, 0, 0.125)]:
            draw = Draws(seed, epoch, record, "image", number % 3)
            found = adjustments(draw, **dict(zip(["brightness", "contrast", "saturation", "hue"], by, strict=True)))
            lines.append(json.dumps({**case, "by": by, "adjustments": found}))
    Path(__file__).with_name("draws.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

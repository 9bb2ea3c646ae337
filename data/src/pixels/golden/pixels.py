"""Golden images: torchvision 0.26 and Pillow 13 compute, `ebbflow-data` must agree.

    pip install torch==2.11.0 torchvision==0.26.0 pillow==13.0.0 numpy && python data/src/pixels/golden/pixels.py

writes beside this file, for `data/src/pixels/golden.rs`:

- `*.jpg`, `*.png`, `*.webp`: small images of every kind that the decoder reads.
- `expected.safetensors`: the pixels [height, width, channels] after each operation.
- `cases.json`: the operations. The name of a case is the name of its pixels.

JPEGs are decoded by torchvision, other images by Pillow. The draws of random operations are part of a case: the formulas
of `get_params` are repeated below on these numbers, in double precision.
"""

import io
import json
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional import _geometry

HERE = Path(__file__).parent
CASES = []
EXPECTED = {}


def case(name, pixels=None, **fields):
    CASES.append({"name": name, **fields})
    if pixels is not None:
        EXPECTED[name] = np.ascontiguousarray(pixels)


def hwc(tensor):
    return tensor.permute(1, 2, 0).numpy()


def chw(array):
    return torch.from_numpy(np.array(array)).reshape(array.shape[0], array.shape[1], -1).permute(2, 0, 1).contiguous()


def drawing(height, width, seed):
    """Gradients, edges of saturated colours, and noise."""
    numbers = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([255 * x / width, 255 * y / height, 128 + 127 * np.sin(x * y / 40)], axis=-1)
    image[height // 4 : height // 2, width // 3 : width // 2] = (255, 0, 0)
    image[height // 2 :, : width // 4] = (0, 0, 255)
    image[: height // 5, width // 2 :] = (0, 255, 0)
    image[-3:, -4:] = 255
    image[:3, :4] = 0
    image += numbers.normal(0, 12, image.shape) * (x > width * 0.6)[..., None]
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def save(name, image, **options):
    buffer = io.BytesIO()
    image.save(buffer, {"jpg": "JPEG"}.get(name.split(".")[1], name.split(".")[1].upper()), **options)
    (HERE / name).write_bytes(buffer.getvalue())
    return buffer.getvalue()


def decodes(name, image, **options):
    """Writes a file, and the pixels that torchvision or Pillow read from it."""
    content = save(name, image, **options)
    read = Image.open(io.BytesIO(content))
    rgb = np.array(read.convert("RGB"))
    if name.endswith(".jpg") and read.mode != "CMYK":
        of_torchvision = hwc(decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB))
        if (of_torchvision != rgb).any():
            print(f"{name}: Pillow and torchvision differ by {np.abs(of_torchvision.astype(int) - rgb).max()}")
        rgb = of_torchvision
    case(f"decode/{name}/3", rgb, op="decode", file=name, channels=3)
    case(f"decode/{name}/1", np.array(read.convert("L"))[..., None], op="decode", file=name, channels=1)
    return rgb


def decoding():
    small, odd = drawing(24, 29, 1), drawing(37, 53, 2)
    main = decodes("420.jpg", odd, quality=92, subsampling="4:2:0")
    decodes("444.jpg", small, quality=92, subsampling="4:4:4")
    decodes("422.jpg", small, quality=85, subsampling="4:2:2")
    decodes("progressive.jpg", small, quality=90, progressive=True)
    decodes("progressive444.jpg", small, quality=75, progressive=True, subsampling="4:4:4")
    decodes("restart.jpg", small, quality=90, restart_marker_blocks=2)
    decodes("coarse.jpg", small, quality=10)
    decodes("finest.jpg", small, quality=100)
    decodes("grey.jpg", small.convert("L"), quality=90)
    decodes("grey_progressive.jpg", small.convert("L"), quality=90, progressive=True)
    decodes("rgb.jpg", small, quality=90, keep_rgb=True)
    decodes("cmyk.jpg", small.convert("CMYK"), quality=90)
    for height, width in [(1, 1), (1, 9), (9, 1), (8, 8), (17, 2), (3, 33)]:
        decodes(f"{height}x{width}.jpg", small.resize((width, height)), quality=90)
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation: turned by a quarter
    decodes("exif.jpg", small, quality=90, exif=exif)

    alpha = small.copy()
    alpha.putalpha(small.convert("L"))
    decodes("rgb.png", small)
    decodes("rgba.png", alpha)
    decodes("grey.png", small.convert("L"))
    decodes("grey_alpha.png", small.convert("LA"))
    decodes("bits.png", small.convert("1"))
    decodes("palette.png", small.quantize(13), transparency=2)
    decodes("lossy.webp", small, quality=80)
    decodes("lossless.webp", small, lossless=True)
    decodes("alpha.webp", alpha, quality=80)
    return main


def resizing(main):
    image = chw(main)
    for name, (top, left, height, width), (to_height, to_width) in [
        ("down", (0, 0, 37, 53), (16, 16)),
        ("up", (0, 0, 37, 53), (43, 59)),
        ("wider", (0, 0, 37, 53), (20, 61)),
        ("part", (3, 5, 20, 30), (16, 17)),
        ("part_up", (11, 20, 7, 9), (32, 32)),
        ("least", (0, 0, 37, 53), (1, 2)),
        ("rows", (0, 0, 37, 53), (12, 53)),
        ("columns", (0, 0, 37, 53), (37, 20)),
        ("same", (2, 3, 11, 13), (11, 13)),
        ("tiny", (4, 4, 2, 2), (5, 7)),
    ]:
        part = F.crop(image, top, left, height, width)
        grey = chw(np.array(Image.fromarray(hwc(part)).convert("L"))[..., None])
        fields = dict(op="resize", top=top, left=left, height=height, width=width, to=[to_height, to_width])
        size = [to_height, to_width]
        case(f"resize/{name}/3", hwc(F.resize(part, size, antialias=True)), channels=3, **fields)
        case(f"resize/{name}/1", hwc(F.resize(grey, size, antialias=True)), channels=1, **fields)


def geometry(main):
    image = chw(main)[:, :11, :14]
    for top, left, height, width in [(2, 3, 5, 6), (-3, -2, 8, 9), (7, 9, 8, 8), (-2, 4, 16, 3), (20, 0, 2, 2)]:
        crop = F.crop(image, top, left, height, width)
        case(f"crop/{top},{left},{height},{width}", hwc(crop), op="crop", box=[top, left, height, width])
    for height, width in [(4, 5), (5, 4), (11, 14), (13, 17), (12, 7), (6, 19)]:
        case(f"center/{height}x{width}", hwc(F.center_crop(image, [height, width])), op="center", to=[height, width])
    case("flip/horizontal", hwc(F.horizontal_flip(image)), op="flip", horizontal=True)
    case("flip/vertical", hwc(F.vertical_flip(image)), op="flip", horizontal=False)
    for height, width, size in [(375, 500, 256), (500, 375, 256), (37, 53, 224), (1, 999, 7), (333, 333, 32), (480, 641, 97)]:
        got = _geometry._compute_resized_output_size((height, width), [size])
        case(f"short_side/{height},{width},{size}", op="short_side", shape=[height, width], size=size, to=got)


def random_resized(height, width, scale, ratio, draws):
    """`RandomResizedCrop.make_params` on given draws."""
    draws = iter(draws)
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        target = area * (scale[0] + (scale[1] - scale[0]) * next(draws))
        aspect = math.exp(low + (high - low) * next(draws))
        w = int(round(math.sqrt(target * aspect)))
        h = int(round(math.sqrt(target / aspect)))
        if 0 < w <= width and 0 < h <= height:
            return int(next(draws) * (height - h + 1)), int(next(draws) * (width - w + 1)), h, w
    in_ratio = width / height
    if in_ratio < min(ratio):
        w, h = width, int(round(width / min(ratio)))
    elif in_ratio > max(ratio):
        w, h = int(round(height * max(ratio))), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def windows():
    numbers = np.random.default_rng(7)
    shapes = [(375, 500), (500, 333), (32, 32), (20, 400), (400, 20), (1, 7)]
    for index in range(24):
        height, width = shapes[index % len(shapes)]
        scale, ratio = [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.5, 0.9), (0.5, 2.0))][index // 12]
        draws = numbers.random(22).round(6).tolist()
        window = random_resized(height, width, scale, ratio, draws)
        fields = dict(shape=[height, width], scale=scale, ratio=ratio, draws=draws, window=window)
        case(f"window/{index}", op="window", **fields)


def color(main):
    image = chw(main)[:, 4:22, 12:41].contiguous()
    case("color/input", hwc(image), op="input")
    for kind, factors in [
        ("brightness", [0.0, 0.3, 1.0, 1.7]),
        ("contrast", [0.0, 0.4, 1.0, 1.6]),
        ("saturation", [0.0, 0.5, 1.0, 1.8]),
        ("hue", [-0.5, -0.21, 0.0, 0.1, 0.37, 0.5]),
    ]:
        adjust = getattr(F, f"adjust_{kind}")
        for factor in factors:
            case(f"{kind}/{factor}", hwc(adjust(image, factor)), op="adjust", kind=kind, factor=factor)
    case("contrast/grey", hwc(F.adjust_contrast(image[:1], 0.6)), op="adjust_grey", factor=0.6)


def normalizing():
    ramp = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(3, 1, 1)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    steps = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    case("normalize", steps(ramp).numpy(), op="normalize", mean=mean, std=std)


def write():
    header, data = {}, b""
    for name, values in EXPECTED.items():
        kind = {"uint8": "U8", "float32": "F32"}[str(values.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (HERE / "expected.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    lines = ",\n".join(json.dumps(case) for case in CASES)
    (HERE / "cases.json").write_text(f"[\n{lines}\n]\n")


MAIN = decoding()
resizing(MAIN)
geometry(MAIN)
windows()
color(MAIN)
normalizing()
write()

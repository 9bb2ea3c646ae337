"""Trains PyTorch's own layers and torchvision's models as TorchScript modules: each builds, trains two steps, and ends with the same
bits for one worker and for three.

    python tests/scripted/train.py --ebb target/release/ebb             every layer of torch.nn that scripts
    python tests/scripted/train.py --ebb .. --torchvision               the models of torchvision instead
    python tests/scripted/train.py --ebb .. TransformerEncoder GRU      only these
    python tests/scripted/train.py --list                               their names

A layer stands between two linear layers, so that it has gradients to pass on. A class of torch.nn that has no entry here is an error.
Needs PyTorch 2.11 and NumPy, and torchvision 0.26 for its models.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch
from torch import Tensor, nn

RECORDS, FEATURES, CLASSES = 24, 6, 4

# Not layers that a module calls by themselves, and why.
APART = {
    "Module": "the base class",
    "Container": "the base class",
    "Parameter": "no module",
    "UninitializedParameter": "no module",
    "UninitializedBuffer": "no module",
    "Buffer": "no module",
    "DataParallel": "runs on several devices, and is not scripted",
    "ParameterList": "a list, which is not called",
    "ParameterDict": "a table, which is not called",
    "ModuleDict": "a table, which is not called",
    "LSTMCell": "see Cells",
    "GRUCell": "see Cells",
    "RNNCell": "see Cells",
    "RNNBase": "the base class",
    "RNNCellBase": "the base class",
    "NLLLoss2d": "deprecated, of NLLLoss",
    "CrossMapLRN2d": "a Python function, which does not script",
    "AdaptiveLogSoftmaxWithLoss": "slices its classes in a way that TorchScript does not have",
    "MaxUnpool1d": "does not run as a script in PyTorch 2.11 itself (isIntList() INTERNAL ASSERT FAILED)",
    "MaxUnpool2d": "see MaxUnpool1d",
    "MaxUnpool3d": "see MaxUnpool1d",
    "SyncBatchNorm": "on CUDA only",
    "GaussianNLLLoss": "does not script: a comprehension with a condition",
    "TripletMarginWithDistanceLoss": "does not script: keyword-only arguments with defaults",
}


class Between(nn.Module):
    """Linear, the layer on records of `shape`, linear."""

    def __init__(self, layer, shape):
        super().__init__()
        self.shape = list(shape)
        self.first = nn.Linear(FEATURES, int(np.prod(shape)))
        self.layer = layer
        layer.eval()
        with torch.no_grad():
            width = layer(torch.full([2, *shape], 0.5)).flatten(1).shape[1]
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x).view([-1] + self.shape)).flatten(1))


class Comparing(nn.Module):
    """A loss between two of a network's outputs, or an output and fixed labels."""

    def __init__(self, loss, labels: str):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.last = nn.Linear(8, CLASSES)
        self.loss = loss
        self.labels = labels

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x))
        one = torch.ones([h.size(0)])
        if self.labels == "classes":
            loss = self.loss(torch.log(h), torch.zeros([h.size(0)], dtype=torch.long))
        elif self.labels == "many":
            loss = self.loss(h, torch.zeros([h.size(0), 8], dtype=torch.long) - 1)
        elif self.labels == "sign":
            loss = self.loss(h, torch.ones([h.size(0), 8]))
        else:
            loss = self.loss(h, torch.full([h.size(0), 8], 0.25))
        return self.last(h) + loss.mean() * one.unsqueeze(1)


class Three(nn.Module):
    """A loss of three inputs."""

    def __init__(self, loss, kind: str):
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.last = nn.Linear(12, CLASSES)
        self.loss = loss
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x))
        a, b, c = h[:, :4], h[:, 4:8], h[:, 8:]
        one = torch.ones([h.size(0)])
        if self.kind == "sign":
            loss = self.loss(a, b, one)
        elif self.kind == "rank":
            loss = self.loss(a[:, 0], b[:, 0], one)
        else:
            loss = self.loss(a, b, c)
        return self.last(h) + loss.mean()


class Connecting(nn.Module):
    """CTC: probabilities of letters over time."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 40)
        self.last = nn.Linear(40, CLASSES)
        self.loss = nn.CTCLoss()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        letters = h.view(-1, 8, 5).log_softmax(2).transpose(0, 1)
        n = h.size(0)
        targets = torch.ones([n, 3], dtype=torch.long)
        lengths = torch.full([n], 8, dtype=torch.long)
        wanted = torch.full([n], 3, dtype=torch.long)
        return self.last(h) + self.loss(letters, targets, lengths, wanted)


class First(nn.Module):
    """The first of a layer's answers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class Both(nn.Module):
    """A layer of two inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x * 0.5)


class Masked(nn.Module):
    """An encoder that does not look ahead."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


class Embedded(nn.Module):
    """Numbers of words, made of the features."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(8 * FEATURES if isinstance(layer, nn.Embedding) else 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer((x.abs() * 3).to(torch.long).clamp(0, 9)).flatten(1))


class Cells(nn.Module):
    """The three cells, one step each."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(8, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.lstm(x)
        return self.rnn(x, self.gru(c, h))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def layers():
    """Name -> function that makes a module from features to logits."""
    flat, line, plane, space, words = (8,), (4, 12), (4, 8, 8), (2, 6, 6, 6), (5, 8)
    table = {}

    def add(name, make, shape, *args, **kwargs):
        table[name] = lambda: Between(make(*args, **kwargs), shape)

    for name in """ReLU ReLU6 ELU SELU CELU GELU SiLU Mish Sigmoid LogSigmoid Tanh Softplus Softsign Softshrink Hardshrink Tanhshrink
                   Hardsigmoid Hardtanh Hardswish LeakyReLU RReLU PReLU Identity Dropout AlphaDropout FeatureAlphaDropout Flatten""".split():
        add(name, getattr(nn, name), flat)
    add("Threshold", nn.Threshold, flat, 0.1, 0.0)
    for name in ["Softmax", "Softmin", "LogSoftmax", "GLU"]:
        add(name, getattr(nn, name), flat, 1)
    add("Softmax2d", nn.Softmax2d, plane)
    add("Linear", nn.Linear, flat, 8, 5)
    add("Bilinear", lambda: Both(nn.Bilinear(8, 8, 5)), flat)
    add("Sequential", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)), flat)
    table["ModuleList"] = lambda: Between(Listed(), flat)
    add("Unflatten", nn.Unflatten, flat, 1, (2, 4))
    for dims, shape in [(1, line), (2, plane), (3, space)]:
        channels = shape[0]
        add(f"Conv{dims}d", getattr(nn, f"Conv{dims}d"), shape, channels, 6, 3, padding=1)
        add(f"ConvTranspose{dims}d", getattr(nn, f"ConvTranspose{dims}d"), shape, channels, 3, 3, stride=2)
        add(f"BatchNorm{dims}d", getattr(nn, f"BatchNorm{dims}d"), shape, channels)
        add(f"InstanceNorm{dims}d", getattr(nn, f"InstanceNorm{dims}d"), shape, channels, affine=True, track_running_stats=True)
        add(f"MaxPool{dims}d", getattr(nn, f"MaxPool{dims}d"), shape, 2)
        add(f"AvgPool{dims}d", getattr(nn, f"AvgPool{dims}d"), shape, 2)
        add(f"AdaptiveAvgPool{dims}d", getattr(nn, f"AdaptiveAvgPool{dims}d"), shape, 2)
        add(f"AdaptiveMaxPool{dims}d", getattr(nn, f"AdaptiveMaxPool{dims}d"), shape, 2)
        add(f"LPPool{dims}d", getattr(nn, f"LPPool{dims}d"), shape, 2, 2)
        add(f"Dropout{dims}d", getattr(nn, f"Dropout{dims}d"), shape, 0.2)
        for kind in ["ConstantPad", "ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"]:
            args = (1, 0.5) if kind == "ConstantPad" else (1,)
            add(f"{kind}{dims}d", getattr(nn, f"{kind}{dims}d"), shape, *args)
        for kind, args in [("Conv", (6, 3)), ("ConvTranspose", (3, 3)), ("BatchNorm", ()), ("InstanceNorm", ())]:
            lazy = getattr(nn, f"Lazy{kind}{dims}d")
            table[f"Lazy{kind}{dims}d"] = lambda lazy=lazy, args=args, shape=shape: Between(lazy(*args), shape)
    table["LazyLinear"] = lambda: Between(nn.LazyLinear(5), flat)
    add("FractionalMaxPool2d", nn.FractionalMaxPool2d, plane, 2, output_size=4)
    add("FractionalMaxPool3d", nn.FractionalMaxPool3d, space, 2, output_size=3)
    add("GroupNorm", nn.GroupNorm, plane, 2, 4)
    add("LayerNorm", nn.LayerNorm, words, 8)
    add("RMSNorm", nn.RMSNorm, words, 8)
    add("LocalResponseNorm", nn.LocalResponseNorm, plane, 2)
    add("ChannelShuffle", nn.ChannelShuffle, plane, 2)
    add("PixelShuffle", nn.PixelShuffle, plane, 2)
    add("PixelUnshuffle", nn.PixelUnshuffle, plane, 2)
    add("Upsample", nn.Upsample, plane, scale_factor=2.0, mode="bilinear")
    add("UpsamplingNearest2d", nn.UpsamplingNearest2d, plane, scale_factor=2.0)
    add("UpsamplingBilinear2d", nn.UpsamplingBilinear2d, plane, scale_factor=2.0)
    add("Fold", nn.Fold, (16, 9), (4, 4), (2, 2))
    add("Unfold", nn.Unfold, plane, 3)
    add("CosineSimilarity", lambda: Both(nn.CosineSimilarity(dim=2)), words)
    add("PairwiseDistance", lambda: Both(nn.PairwiseDistance()), words)
    for name in ["RNN", "LSTM", "GRU"]:
        add(name, lambda kind=getattr(nn, name): First(kind(8, 6, num_layers=2, dropout=0.1, batch_first=True)), words)
    table["Cells"] = lambda: Between(Cells(), flat)
    table["Embedding"] = lambda: Embedded(nn.Embedding(10, 8))
    table["EmbeddingBag"] = lambda: Embedded(nn.EmbeddingBag(10, 8, mode="mean"))
    table["MultiheadAttention"] = lambda: Between(Attending(), words)
    add("TransformerEncoderLayer", nn.TransformerEncoderLayer, words, 8, 2, 16, batch_first=True)
    add("TransformerDecoderLayer", lambda: Both(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)), words)
    add("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), words)
    add("TransformerDecoder", lambda: Both(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)), words)
    add("Transformer", lambda: Both(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), words)
    table["MaskedTransformerEncoder"] = lambda: Between(Masked(), words)
    for name in ["L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "KLDivLoss", "PoissonNLLLoss"]:
        table[name] = lambda loss=getattr(nn, name): Comparing(loss(), "values")
    for name in ["SoftMarginLoss", "HingeEmbeddingLoss", "MultiLabelSoftMarginLoss"]:
        table[name] = lambda loss=getattr(nn, name): Comparing(loss(), "sign")
    for name in ["CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"]:
        table[name] = lambda loss=getattr(nn, name): Comparing(loss(), "classes")
    table["MultiLabelMarginLoss"] = lambda: Comparing(nn.MultiLabelMarginLoss(), "many")
    table["CosineEmbeddingLoss"] = lambda: Three(nn.CosineEmbeddingLoss(), "sign")
    table["MarginRankingLoss"] = lambda: Three(nn.MarginRankingLoss(), "rank")
    table["TripletMarginLoss"] = lambda: Three(nn.TripletMarginLoss(), "three")
    table["CTCLoss"] = Connecting
    return table


class Seeing(nn.Module):
    """A model of torchvision on small pictures."""

    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x.view(-1, 3, 8, 8), size=[self.size, self.size])
        return self.model(x)


class SeeingMore(nn.Module):
    """A model of torchvision that answers in a tuple while it trains."""

    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x.view(-1, 3, 8, 8), size=[self.size, self.size])
        return self.model(x)[0]


SMALLEST = {"inception_v3": 96, "swin_t": 32, "maxvit_t": 224, "alexnet": 64}


def pictures():
    import torchvision

    table = {}
    large = ("vit_h", "vit_l", "regnet_y_128", "convnext_large", "efficientnet_v2_l", "wide_resnet101", "regnet_y_32", "resnext101_64")
    for name in torchvision.models.list_models(module=torchvision.models):
        if name.startswith(large):
            continue
        size = SMALLEST.get(name, 224 if name.startswith(("vit", "maxvit")) else 64)

        def make(name=name, size=size):
            options = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
            if options:
                options["init_weights"] = False
            model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
            more = name in ("googlenet", "inception_v3")
            return (SeeingMore if more else Seeing)(model, size)

        table[name] = make
    return table


def write(folder, name, make, features):
    """The module, its data and its job."""
    torch.manual_seed(1)
    module = make()
    script = torch.jit.script(module)
    script.save(str(folder / "model.pt"))
    stream = np.random.default_rng(3)
    np.save(folder / "features.npy", stream.standard_normal((RECORDS, *features), dtype=np.float32))
    np.save(folder / "labels.npy", stream.integers(0, CLASSES, RECORDS))
    (folder / "job.toml").write_text(
        f"""name = "{name}"
epochs = 1
model = {{ script = "model.pt" }}
data = {{ format = "npy", train = {{ features = ["features.npy"], labels = ["labels.npy"] }} }}
batch = {{ micro = 4, effective = 12 }}
optimizer = {{ kind = "momentum", momentum = 0.9, learning_rate = 0.01 }}
fleet = {{ workers = {{ min = 1, max = 3 }}, ps = 2 }}
"""
    )


def train(ebb, folder, workers):
    out = folder / f"out-{workers}"
    command = [ebb, "run", str(folder / "job.toml"), "--workers", str(workers), "--device", "cpu", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr.strip() or ended.stdout.strip())
    summary = json.loads((out / "summary.json").read_text())
    if summary["steps"] != 2:
        raise RuntimeError(f"{summary['steps']} steps, expected 2")
    return summary["model_sha256"]


def missing():
    """Classes of torch.nn that have no entry."""
    known = set(layers()) | set(APART)
    classes = {name for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, (nn.Module, nn.Parameter))}
    return sorted(classes - known)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ebb")
    parser.add_argument("--torchvision", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    table, features = (pictures(), (192,)) if arguments.torchvision else (layers(), (FEATURES,))
    if arguments.list:
        print(*sorted(table), sep="\n")
        return 0
    wrong = [] if arguments.torchvision else [f"torch.nn.{name} has no entry" for name in missing()]
    names = arguments.names or sorted(table)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            try:
                write(folder, name, table[name], features)
                if arguments.ebb:
                    one, three = (train(arguments.ebb, folder, workers) for workers in (1, 3))
                    if one != three:
                        raise RuntimeError(f"other bits: {one} with one worker, {three} with three")
                print(f"ok    {name}", flush=True)
            except Exception as error:
                wrong.append(f"{name}: {error}")
                print(f"WRONG {name}: {str(error).strip().splitlines()[-1]}", flush=True)
    print(f"{len(names)} modules, {len(wrong)} wrong")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The network of this example, and how `model.pt` was made:

    PYTHONHASHSEED=0 python examples/gpt/model.py        # PyTorch 2.11; the seed orders the code in the file
"""

import math
import pathlib
import zipfile

import torch
from torch import nn
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 22, 44, 48, 4, 2


class Block(nn.Module):
    """A layer of a GPT: causal attention, then a small network, each beside what it got."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_rest = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rest = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, length, width = x.shape
        split = [n, length, self.heads, width // self.heads]
        query, key, value = self.attention(self.before_attention(x)).chunk(3, dim=2)
        mixed = functional.scaled_dot_product_attention(
            query.view(split).transpose(1, 2),
            key.view(split).transpose(1, 2),
            value.view(split).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.mixed(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.rest(self.before_rest(x))


class Gpt(nn.Module):
    """A GPT as in Radford et al. (2019), small: tokens `[n, length]` to logits `[n, length, words]`."""

    def __init__(self, words: int, length: int, width: int, heads: int, layers: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.last, self.words = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # As GPT-2 does: layers that add to what they got begin smaller.
                adds = name.endswith(("mixed.weight", "rest.2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.size(1)]
        return self.words(self.last(self.blocks(x)))


def export(path):
    """Writes the script without its debug files, which name this machine's folders."""
    torch.manual_seed(7)
    full = path.with_suffix(".full")
    torch.jit.script(Gpt(WORDS, LENGTH, WIDTH, HEADS, LAYERS)).save(str(full))
    with zipfile.ZipFile(full) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            if not item.filename.endswith(".debug_pkl"):
                target.writestr(zipfile.ZipInfo(f"model/{item.filename.split('/', 1)[1]}"), source.read(item))
    full.unlink()


if __name__ == "__main__":
    export(pathlib.Path(__file__).with_name("model.pt"))

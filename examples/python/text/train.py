"""Learns to tell good reviews from bad ones, from files of this folder."""

import argparse
from pathlib import Path

import ebbflow
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

LABELS = ["bad", "good"]
PADDING = 0


class Reviews(Dataset):
    """Lines of a file, each a label and a text. Words that ``numbers`` lacks are left out."""

    def __init__(self, file, numbers=None):
        lines = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
        self.pairs = [line.split("\t", 1) for line in lines]
        words = sorted({word for _, text in self.pairs for word in text.split()})
        self.numbers = numbers or {word: number for number, word in enumerate(words, PADDING + 1)}

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, record):
        label, text = self.pairs[record]
        words = [self.numbers[word] for word in text.split() if word in self.numbers]
        return torch.tensor(words), LABELS.index(label)


def collate(records):
    """Return texts of one length, i64 `[n, words]`, and labels, i64 `[n]`."""
    texts, labels = zip(*records)
    return nn.utils.rnn.pad_sequence(texts, True, PADDING), torch.tensor(labels)


class Classifier(nn.Module):
    """Embeddings of words, and a recurrent layer that reads them backwards."""

    def __init__(self, words, width=32):
        super().__init__()
        self.embedding = nn.Embedding(words + 1, width, padding_idx=PADDING)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(LABELS))

    def forward(self, texts):
        _, last = self.reader(self.embedding(texts.flip(1)))
        return self.head(last[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(1)
    train = Reviews("train.tsv")
    test = Reviews("test.tsv", train.numbers)
    model = Classifier(len(train.numbers))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test, batch_size=100, collate_fn=collate)

    def measure(batch):
        outputs = model(batch.x)
        right = (outputs.argmax(1) == batch.y).float().mean()
        return {"loss": functional.cross_entropy(outputs, batch.y), "accuracy": right}

    options = {"epochs": args.epochs, "clip_norm": 1.0, "seed": 1, "name": "text"}
    with ebbflow.join(model, optimizer, train_loader, test_loader, **options) as job:
        for epoch in job.epochs():
            for texts, labels in epoch:
                job.step(functional.cross_entropy(model(texts), labels))
            print(job.evaluate(measure))


if __name__ == "__main__":
    main()

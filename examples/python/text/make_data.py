"""Writes `train.tsv` and `test.tsv` beside it: a label and a sentence of a review in each line.

    python examples/python/text/make_data.py

A sentence has one or two opinions, and its label is that of the last one. `not` turns an opinion
around, so single words do not tell the label. Equal settings give equal files.
"""

import random
from pathlib import Path

THINGS = "film book meal room concert service story journey garden lesson".split()
GOOD = "good great lovely warm clever fresh bright gentle superb charming".split()
BAD = "bad poor dull cold silly stale noisy rude awful boring".split()
PEOPLE = "we they everyone critics friends".split()


def opinion(draw):
    """Return whether an opinion is good, and its words."""
    is_good, turned = draw.random() < 0.5, draw.random() < 0.4
    word = draw.choice(GOOD if is_good != turned else BAD)
    thing = draw.choice(THINGS)
    no, place = "not " if turned else "", draw.choice(["", "", "very ", "so "])
    forms = [f"the {thing} was {no}{place}{word}", f"{no}a {place}{word} {thing}"]
    forms.append(f"{draw.choice(PEOPLE)} found the {thing} {no}{word}")
    return is_good, draw.choice(forms)


def line(draw):
    is_good, text = opinion(draw)
    if draw.random() < 0.5:
        is_good, more = opinion(draw)
        text += draw.choice([" but ", " , yet ", " , though "]) + more
    return f"{'good' if is_good else 'bad'}\t{text}\n"


def main():
    for name, seed, lines in (("train", 1, 1600), ("test", 2, 400)):
        draw = random.Random(seed)
        text = "".join(line(draw) for _ in range(lines))
        Path(__file__).with_name(f"{name}.tsv").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

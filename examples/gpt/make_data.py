"""Writes `train.bin` and `validation.bin`: generated stories of 44 words, as tokens of u16.

    python examples/gpt/make_data.py        # needs numpy

A story says who has what, tells who gives it to whom, and asks where one of the things is. Stars
fill it up to 44 words:

    anna has the kite . fay has the drum . carl has the coat . carl gives the coat to fay .
    where is the coat ? with fay . * * * ..

The answer follows from the story. All other words are drawn evenly from those that may come next,
so the least perplexity that any model can reach is known. This program prints it.
"""

import math
import pathlib

import numpy as np

NAMES = ["anna", "ben", "carl", "dora", "emil", "fay"]
THINGS = ["ball", "book", "coat", "drum", "kite", "lamp"]
# The first word is the one that `ignore_index` of the job leaves out.
WORDS = ["*", ".", "?", "has", "gives", "is", "the", "to", "where", "with", *NAMES, *THINGS]
LENGTH, OWNERS, GIFTS_MAX = 44, 3, 3


class Stories:
    """Draws stories, and sums what each choice costs a model that knows how they are made."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.nats, self.words = 0.0, 0

    def choose(self, choices):
        """Returns one of the choices."""
        self.nats += math.log(len(choices))
        return choices[self.random.integers(len(choices))]

    def story(self):
        """Returns the words of one story."""
        words, owners = [], {}
        for _ in range(OWNERS):
            name = self.choose([name for name in NAMES if name not in owners.values()])
            thing = self.choose([thing for thing in THINGS if thing not in owners])
            owners[thing] = name
            words += [name, "has", "the", thing, "."]
        for _ in range(GIFTS_MAX):
            # The question, or another gift of one who has something.
            giver = self.choose(["where", *sorted(set(owners.values()))])
            if giver == "where":
                break
            thing = self.choose([thing for thing in owners if owners[thing] == giver])
            taker = self.choose([name for name in NAMES if name != giver])
            words += [giver, "gives", "the", thing, "to", taker, "."]
            owners[thing] = taker
        thing = self.choose(list(owners))
        words += ["where", "is", "the", thing, "?", "with", owners[thing], "."]
        self.words += len(words)
        return words + ["*"] * (LENGTH - len(words))

    def tokens(self, stories):
        """Returns the numbers of the stories' words, one after the other."""
        return np.array([WORDS.index(word) for _ in range(stories) for word in self.story()], "<u2")


def main():
    folder = pathlib.Path(__file__).parent
    for name, seed, count in [("train", 7, 2048), ("validation", 8, 256)]:
        stories = Stories(seed)
        tokens = stories.tokens(count)
        # The label of a record's last word is the word after it.
        np.append(tokens, tokens[:1]).tofile(folder / f"{name}.bin")
        least = math.exp(stories.nats / stories.words)
        print(f"{name}.bin: {count} stories, {len(WORDS)} words, least perplexity {least:.3f}")


if __name__ == "__main__":
    main()

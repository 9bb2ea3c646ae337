"""Golden tokens: the Python package `tokenizers` trains and encodes, the transform `tokenize` must agree.

    pip install tokenizers==0.23.* && python tests/golden/tokens.py

writes into the folder `tokens` beside this file: `wordpiece.json` and `bpe.json`, two small tokenizers as `tokenizer.save` writes them,
and `cases.json`, for `data/src/transform/tokens.rs`: texts, and their tokens with and without special tokens. Training does not always give
the same tokenizer; the three files belong together.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """The worker leases a piece of the data, computes gradients and pushes them.
A parameter server holds one partition of the model. It adds the gradients of a step in a fixed order.
Steps, epochs and records are counted; versions are numbers of steps. Größere Schritte, kleinere Lernrate.
The master says which records are bad, and nobody computes what is not needed any more.
"""

TEXTS = [
    "", "a", "The worker pushes gradients.", "the WORKER leases", "unknownword zzz", "Größere Zahlen", "tabs\tand\nnewlines", "  spaces  around  ",
    "numbers 12345, 3.14", "emoji 🙂 and 漢字", "[CLS] is special [SEP]", "don't stop", "x" * 120, "naïve café", "one-two_three/four",
]


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(TEXT.splitlines(), trainers.WordPieceTrainer(vocab_size=160, special_tokens=special))
    places = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=places)
    return tokenizer


def bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    places = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=places)
    return tokenizer


def main():
    folder, lines = Path(__file__).with_name("tokens"), []
    folder.mkdir(exist_ok=True)
    for name, tokenizer in {"wordpiece": wordpiece(), "bpe": bpe()}.items():
        path = folder / f"{name}.json"
        tokenizer.save(str(path), pretty=False)
        saved = Tokenizer.from_file(str(path))
        for text in TEXTS:
            ids = {key: saved.encode(text, add_special_tokens=special).ids for key, special in (("with", True), ("without", False))}
            lines.append(json.dumps({"tokenizer": name, "text": text} | ids, ensure_ascii=False))
    (folder / "cases.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

"""Makes the training data of the quick start and of the system tests from a real text. No download.

    python st/data/make_data.py FOLDER [--samples 160] [--seq 32] [--vocab 512] [--text st/data/story.txt]

    tokenizer.json      byte-level BPE, trained on the text
    mcore.mindrecord    input_ids, labels, loss_mask, position_ids, each [seq] int32
                        (use_legacy: False, e.g. Qwen3)
    legacy.mindrecord   input_ids [seq + 1] int32
                        (use_legacy: True, e.g. Llama)
    data.json           what was made; written last, so a folder that has it is complete

The text is tokenised and cut into ``samples`` windows at equal distances, which overlap if the text
is short. All windows are distinct, so the row of a sample identifies it. The same arguments give
the same data; a folder that already holds them is left as it is.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "story.txt")
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]  # ids 0, 1, 2, as in configs/*.yaml
# raise it when the same arguments shall give other data
FORMAT = 1


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab`` tokens. Raises ValueError if the text does not give so
    many."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()} tokens, not of {vocab}; "
            f"choose --vocab between {256 + len(SPECIAL_TOKENS)} and that, or a longer text"
        )
    return tokenizer


def cut(tokens: np.ndarray, samples: int, seq: int) -> np.ndarray:
    """``samples`` distinct windows of ``tokens`` [n], at equal distances from begin to end:
    [samples, seq + 1] int32.

    Raises ValueError if the text is too short for so many windows, or two of them are equal.
    """
    last = len(tokens) - (seq + 1)
    if samples < 1 or last < samples - 1:
        raise ValueError(
            f"{len(tokens)} tokens give at most {max(last + 1, 0)} windows of {seq + 1}, but "
            f"{samples} "
            "samples are asked for; choose 1 or more and not more than that, or a longer text"
        )
    starts = [i * last // max(samples - 1, 1) for i in range(samples)]
    windows = np.stack([tokens[s : s + seq + 1] for s in starts]).astype(np.int32)
    distinct = len(np.unique(windows[:, :-1], axis=0))
    if distinct != samples:
        raise ValueError(
            f"only {distinct} of {samples} samples are distinct; choose fewer, or a longer --seq"
        )
    return windows


def write_records(folder: str, windows: np.ndarray) -> None:
    """``windows`` [samples, seq + 1] as mcore.mindrecord and legacy.mindrecord."""
    from mindspore.mindrecord import FileWriter

    seq = windows.shape[1] - 1
    ones, positions = np.ones(seq, np.int32), np.arange(seq, dtype=np.int32)
    rows = {
        "legacy": [{"input_ids": w} for w in windows],
        "mcore": [
            {
                "input_ids": w[:-1].copy(),
                "labels": w[1:].copy(),
                "loss_mask": ones,
                "position_ids": positions,
            }
            for w in windows
        ],
    }
    for name, records in rows.items():
        writer = FileWriter(os.path.join(folder, f"{name}.mindrecord"), 1, overwrite=True)
        writer.add_schema(
            {column: {"type": "int32", "shape": [-1]} for column in records[0]}, "language model"
        )
        # bytes; the defaults of both would make files of 50 MB
        writer.set_header_size(1 << 16)
        writer.set_page_size(1 << 16)
        writer.write_raw_data(records)
        writer.commit()


def describe(text: str, samples: int, seq: int, vocab: int) -> dict[str, object]:
    """The content of data.json."""
    return {
        "format": FORMAT,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "samples": samples,
        "seq": seq,
        "vocab": vocab,
    }


def is_complete(folder: str, wanted: dict[str, object]) -> bool:
    """Returns whether ``folder`` has everything that ``wanted`` describes."""
    names = [f"{n}.mindrecord{end}" for n in ("mcore", "legacy") for end in ("", ".db")]
    names += ["tokenizer.json", "data.json"]
    if not all(os.path.isfile(os.path.join(folder, name)) for name in names):
        return False
    with open(os.path.join(folder, "data.json"), encoding="utf-8") as f:
        try:
            return json.load(f) == wanted
        except ValueError:  # not ours, or torn: make it again
            return False


def make(folder: str, text: str, samples: int = 160, seq: int = 32, vocab: int = 512) -> bool:
    """Fills ``folder``; False if it was complete already. Raises ValueError as ``train_tokenizer``
    and ``cut`` do."""
    wanted = describe(text, samples, seq, vocab)
    if is_complete(folder, wanted):
        return False
    tokenizer = train_tokenizer(text, vocab)
    windows = cut(np.array(tokenizer.encode(text).ids), samples, seq)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(os.path.join(folder, "data.json")):
        os.remove(os.path.join(folder, "data.json"))  # from here on the folder is not complete
    part = tempfile.mkdtemp(prefix=".making-", dir=folder)
    try:
        write_records(part, windows)
        tokenizer.save(os.path.join(part, "tokenizer.json"))
        with open(os.path.join(part, "data.json"), "w", encoding="utf-8") as f:
            json.dump(wanted, f, indent=1)
        for name in sorted(os.listdir(part), key=lambda n: n == "data.json"):
            os.replace(os.path.join(part, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(part)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--text", default=STORY)
    args = parser.parse_args()
    started = time.monotonic()
    with open(args.text, encoding="utf-8") as f:
        text = f.read()
    made = make(args.folder, text, args.samples, args.seq, args.vocab)
    what = f"{args.samples} samples of {args.seq} tokens, vocabulary of {args.vocab}"
    print(
        f"{args.folder}: {what}; "
        + (f"made in {time.monotonic() - started:.1f} s" if made else "already there")
    )


if __name__ == "__main__":
    main()

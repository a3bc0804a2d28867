"""Writes 160 samples of 32 tokens, each of up to three documents: make_packed.py FOLDER.

They are a data set of Hugging Face, with the columns that the data balance of mindformers needs.
``actual_seq_len`` has the ends of the documents, and then the length of the sample.
"""

import sys

import datasets
import numpy as np

random, rows = np.random.default_rng(3), []
for _ in range(160):
    tokens = random.integers(3, 512, 33)
    ends = np.sort(random.choice(np.arange(1, 32), random.integers(0, 3), replace=False))
    rows.append(
        {
            "input_ids": tokens[:32],
            "labels": tokens[1:],
            "loss_mask": np.ones(32),
            "position_ids": np.arange(32),
            "actual_seq_len": np.concatenate([ends, np.full(4 - len(ends), 32)]),
        }
    )
columns = datasets.Features({name: datasets.Sequence(datasets.Value("int32")) for name in rows[0]})
rows = [{name: values.astype(np.int32) for name, values in row.items()} for row in rows]
datasets.Dataset.from_list(rows, features=columns).with_format("numpy").save_to_disk(sys.argv[1])

"""The CPU cluster imports modules that a training does not need on their first use, and then the
real ones."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import inspect, sys
from importlib.util import find_spec
from st.cpu_cluster import later
later.install()
import datasets
import jieba
from datasets.distributed import split_dataset_by_node
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
inspect.getmodule(inspect.currentframe())  # asks every module for its file
assert find_spec("datasets").name == "datasets"
assert not {"pandas", "scipy", "nltk", "jieba.finalseg", "datasets.arrow_dataset"} & set(sys.modules)
words = ["one", "two", "three", "four"]
assert sentence_bleu([words], words, smoothing_function=SmoothingFunction().method3) == 1
halves = [list(split_dataset_by_node(datasets.Dataset.from_dict({"x": [1, 2]}), rank, 2)) for rank in (0, 1)]
assert halves == [[{"x": 1}], [{"x": 2}]]
assert jieba.Tokenizer.__module__ == "jieba" and "jieba.finalseg" in sys.modules
assert "arrow_dataset" in repr(datasets.Dataset) and sys.modules["datasets"].__version__
"""  # noqa: E501


def test_the_real_modules_are_imported_on_first_use():
    pytest.importorskip("datasets")
    pytest.importorskip("nltk")
    pytest.importorskip("jieba")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

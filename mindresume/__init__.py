"""Checkpoint and resume for MindSpore Transformers (``mindformers``).

A training takes it in with ``import mindresume.plugin`` (or the repository's ``run_mindformer.py``); the command line is
``mindresume``. Importing this package, like the command line, imports neither mindspore nor mindformers.
"""
__version__ = "0.1.0"

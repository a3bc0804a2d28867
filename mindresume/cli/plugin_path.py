"""Implements ``mindresume plugin-path``."""
from __future__ import annotations

from pathlib import Path

from mindresume.cli import app


@app.command("plugin-path")
def plugin_path() -> None:
    """Prints the folder for `--register_path` of mindformers' own run_mindformer.py.

    The YAML file then needs one more line, in the `trainer:` block: `auto_register: mindresume_plugin.MindResume`.
    """
    print(Path(__file__).resolve().parent.parent / "mindformers" / "shim")

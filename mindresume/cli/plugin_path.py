"""``mindresume plugin-path``"""
from __future__ import annotations

from pathlib import Path

from mindresume.cli import app


@app.command("plugin-path")
def plugin_path() -> None:
    """Prints the folder for `--register_path` of an unmodified run_mindformer.py.

    Its YAML then needs one line more, in the `trainer:` block: `auto_register: mindresume_plugin.MindResume`.
    """
    print(Path(__file__).resolve().parent.parent / "mindformers" / "shim")

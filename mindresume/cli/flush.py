"""Implements ``mindresume flush``."""
from __future__ import annotations

import sys

from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, Folder, print_json, progress_bar, say
from mindresume.formatting import size_text


@app.command()
def flush(folder: Folder, json: AsJson = False) -> None:
    """Writes the newest save in memory of this node to disk, if the disk is older.

    For a training with memory_tier that has ended and is not started again on this node. Every byte is verified first. On
    several nodes call it on each; the last one completes the checkpoint.
    Exit status: 0 the disk is up to date, 3 there is nothing in memory of this node.
    """
    from mindresume.api import memory
    with progress_bar("writing", json) as progress:
        result = memory.flush(folder, progress=progress)
    if json:
        print_json(result.to_json())
    elif result.step is None:
        say(f"{result.root}: {result.reason}")
    else:
        say(f"{result.root}: step {result.step}, {size_text(result.size_bytes)} written" + (
            "" if result.committed else "; it counts once the other nodes have written their parts"))
    sys.exit(NOTHING if result.step is None and not result.up_to_date else 0)

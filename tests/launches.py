"""What run_mindformer.py makes of a command line and a configuration, without a training."""

import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import pytest

from mindresume.launch import arguments
from mindresume.launch.arguments import Launch, parse
from mindresume.launch.overrides import KNOWN_KEYS, apply
from mindresume.mindformers import upstream

ROOT = Path(__file__).resolve().parents[1]
# options of CheckpointMonitor in a configuration
MONITOR = frozenset(
    argument
    for row in upstream.MINDFORMERS
    if row.name == "CheckpointMonitor.__init__"
    for argument in re.findall(r"(\w+)=", row.signature or "")
)
# of a configuration, that mindresume adds
KEYS = frozenset(KNOWN_KEYS)


def parsed(*argv: str, script: Path = ROOT) -> Launch:
    """Returns what a command line means. ``script``: the folder of the script."""
    return parse(argv, str(script))


def parsed_without_files(*argv: str) -> Launch:
    """Returns the same for a command line that names files of somebody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "find_file", lambda path, folder: path)
        patch.setattr(arguments, "_register_folder", lambda path, folder: path)
        return parsed(*argv)


def override(config: MutableMapping, argv: Sequence[str]) -> list[str]:
    """Changes ``config`` as the command line says. Returns the remarks."""
    return apply(config, parsed(*argv))

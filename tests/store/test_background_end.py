"""How a save that was begun ends when its training does: at an error, at the exit of the interpreter, at a signal."""
import os
import subprocess
import sys
from pathlib import Path

import folders
import pytest

from mindresume.formats.iteration_files import TRACKER
from mindresume.formats.names import META
from mindresume.formats.records import scan_records

KINDS = ["thread", "process"]
TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 60.0

COMMON = """
import atexit, os, signal, sys, time
import folders
from mindresume.state import TrainingState
from mindresume.store.background import Background
from mindresume.store.retention import KEEP_ALL
from mindresume.store.saver import Save
from mindresume.store.shard import Place, iteration_shard, rank_shard
from mindresume.store.storage import PosixStorage


class Held(PosixStorage):
    '''Weights are written as soon as there is a file "go".'''
    def write(self, path, pieces, size=0):
        while size and not os.path.exists("go"):
            time.sleep(0.005)
        return super().write(path, pieces, size)


def saver(kind, version):
    return Background(Place(Held(), os.path.abspath("checkpoint"), folders.RUN, 0, 1, version == "2.0"), KEEP_ALL, kind)


def shard(place, step):
    if place.iterations:
        return iteration_shard("net", place, folders.state_of(step), folders.tensors_of(0, step), None)
    return rank_shard(folders.name_of(0, step), folders.state_of(step), folders.tensors_of(0, step))
"""


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}


def python(folder, text, *arguments, **how):
    (folder / "common_of_training.py").write_text(COMMON)            # a writer process imports it, too
    (folder / "training.py").write_text(f"from common_of_training import *\n{text}")
    return subprocess.Popen([sys.executable, "training.py", *arguments], cwd=folder, env=environment(), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **how)


def committed(folder):
    return [found.step for found in scan_records(folders.STORAGE, str(folder / "checkpoint"))[0] if found.committed]


def pointer(folder, version):
    return folder / "checkpoint" / (TRACKER if version == "2.0" else f"rank_0/{META}")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_in_flight_is_committed_when_the_interpreter_ends_with_an_error(tmp_path, kind, version):
    """The weights come when the interpreter is ending already and pools of threads take no more work."""
    training = python(tmp_path, """
saver = saver(*sys.argv[1:])
atexit.register(saver.finish, 60)
atexit.register(lambda: open("go", "w").close())        # runs before
saver.save(Save(shard(saver.place, 5)))
raise ValueError("the training failed")
""", kind, version)
    _, errors = training.communicate(timeout=PATIENCE)
    assert training.returncode == 1 and "the training failed" in errors and "futures" not in errors
    assert committed(tmp_path) == [5] and pointer(tmp_path, version).exists()

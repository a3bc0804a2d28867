"""The same CheckpointMonitor with ``use_legacy_format: False``: iteration folders."""

import json
import os

import pytest

from mindresume.formats import CheckpointDir

pytest.importorskip("mindformers.tools")

from monitor_jobs import Job, own_context, resume  # noqa: E402, F401  the fixture applies to these tests too
from monitor_jobs import build as build_any  # noqa: E402

from mindresume.coordination.storage_topology import SharedGroups  # noqa: E402
from mindresume.errors import ConfigError  # noqa: E402
from mindresume.formats.iterations import TRACKER  # noqa: E402
from mindresume.formats.scan import scan  # noqa: E402
from mindresume.model.manifest import FOLDER  # noqa: E402
from mindresume.saving import save_session  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402
from mindresume.tensor_files import read_header  # noqa: E402

FILES = [
    "common.json",
    "net-model-0000000-0000001.safetensors",
    "net-opt-0000000-0000001.safetensors",
]


def build(folder, done=0, **options):
    return build_any(folder, done, **{"use_legacy_format": False, **options})


def folders(root):
    return sorted(name for name in os.listdir(root) if name.startswith("iteration_"))


def tensors(path):
    with open(path, "rb") as file:
        return set(read_header(file, str(path)).tensors)


def test_without_the_optimizer(tmp_path):
    """Nor files for inference: mindformers ignores save_network_params in Checkpoint 2.0
    (callback.py:step_end)."""
    Job(build(tmp_path, save_optimizer=False, save_network_params=True)).steps(5)
    assert sorted(os.listdir(tmp_path)) == sorted([FOLDER, "iteration_00000005", TRACKER])
    assert sorted(os.listdir(tmp_path / "iteration_00000005")) == sorted([FOLDER, *FILES[:2]])
    assert tensors(tmp_path / "iteration_00000005" / FILES[1]) == {"weight", "bias"}


@pytest.mark.parametrize("status", [0, 1])
def test_the_health_of_a_checkpoint(tmp_path, monkeypatch, status):
    monitor = build(tmp_path, use_checkpoint_health_monitor=True)
    monkeypatch.setattr(monitor, "get_checkpoint_health_info", lambda params: status)
    Job(monitor).steps(5)
    common = json.loads((tmp_path / "iteration_00000005" / "common.json").read_text())
    assert common["ckpt_status"] == status
    assert scan(CheckpointDir(PosixStorage(), str(tmp_path))).candidates[0].state.health == status
    assert not (tmp_path / "health_ckpts.json").exists()


def test_a_folder_that_other_hosts_do_not_see_is_refused_before_the_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        save_session, "find_shared_groups", lambda directory, group: SharedGroups((0,) * 8 + (8, 8))
    )
    with pytest.raises(
        ConfigError, match="not supported in non-shared storage environments .* rank 8, 9 cannot"
    ):
        Job(build(tmp_path))

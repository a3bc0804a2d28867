"""Conversions under MindSpore's msrun: its workers share the files, and its scheduler, which they
never call, ends too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from st.cpu_cluster.launch import free_port
from st.run_attempts import FIXTURES, LIMIT
from st.test_huggingface import SIZES
from st.training_run import ROOT

# of mindformers alone: a Qwen3, four ranks
FOUR = FIXTURES / "mf190_10_safetensors_dp2tp2" / "output"
SOURCE = (FOUR / "checkpoint", "--from", FOUR / "strategy")
MODEL = {**SIZES, "architectures": ["Qwen3ForCausalLM"]}
LAUNCHERS = ("MS_", "RANK_", "OMPI_", "PMI", "SLURM_")
MODULE = ("python", "-m", "mindresume")
SCRIPT = (str(Path(sys.executable).parent / "mindresume"),)


@pytest.fixture(autouse=True)
def _cpu_only(device):
    if device != "CPU":
        pytest.skip("nothing here needs a device")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = [str(Path(sys.executable).parent), clean["PATH"]]
    return {**clean, "PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT), **more}


def msrun(
    logs: Path, *words: object, processes: int = 2, command: tuple[str, ...] = MODULE, **more: str
) -> int:
    """Returns the exit status of msrun."""
    started = [
        sys.executable,
        "-m",
        "mindspore.parallel.cluster.run",
        f"--worker_num={processes}",
        f"--local_worker_num={processes}",
        f"--master_port={free_port()}",
        f"--log_dir={logs}",
        "--join=True",
    ]
    return subprocess.run(
        [*started, *command, *map(str, words)],
        env=environment(**more),
        cwd=logs.parent,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    ).returncode


def alone(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "mindresume", *map(str, words)],
        env=environment(),
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )


def content(folder: Path) -> dict[str, bytes | None]:
    """Returns {path: bytes}, of records only the path: they contain times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and ".mindresume" not in path.parts
        else None
        for path in sorted(folder.rglob("*"))
    }


def printed(logs: Path, rank: int) -> str:
    return (logs / f"worker_{rank}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words, processes, command",
    [
        (("convert", *SOURCE, "new", "--to", "tp=2,dp=2"), 4, MODULE),
        # by default tests/api/test_shared_conversion.py
        pytest.param(
            ("merge", *SOURCE, "new", "--part-size", "20kB"), 2, SCRIPT, marks=pytest.mark.soak
        ),
        pytest.param(
            ("export-hf", *SOURCE, "new", "--config", ".", "--max-shard-size", "30kB"),
            3,
            MODULE,
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_bytes_of_one_process(tmp_path, words, processes, command):
    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    words = [
        tmp_path if word == "." else tmp_path / "new" if word == "new" else word for word in words
    ]
    assert msrun(tmp_path / "logs", *words, processes=processes, command=command) == 0, printed(
        tmp_path / "logs", 0
    )
    assert str(tmp_path / "new") in printed(tmp_path / "logs", 0)
    os.rename(tmp_path / "new", tmp_path / "many")
    alone(*words)
    assert content(tmp_path / "many") == content(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["config.json", "logs", "many", "new"]

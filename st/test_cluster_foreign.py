"""Several processes go on from what mindformers alone wrote, die, and go on from what we wrote beside it.

    st/fixtures ─▶ step 15 of mindformers ─▶ trains 16 to 19, saves 16 and 18 ─▶ SIGKILL to all ─▶ resumed at 18 ─▶ the end

Once with safetensors and remove_redundancy, once with ckpt and optimizer parallelism; data parallel 2 x model parallel 2.
The losses are compared with those that mindformers recorded when nothing interrupted it, and between the lives.
"""
from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.tensor_files import read_header
from mindresume.tensor_files.header import Header
from st.jobs import ROOT, Run
from st.lives import ALL_RANKS_END, copied, ended

pytestmark = pytest.mark.timeout(1200)
FIXTURES = ROOT / "st" / "fixtures"
NODUP, OPTIMIZER, OLD = "mf190_10_safetensors_dp2tp2_nodup", "mf190_10_ckpt_dp2tp2opt", "mf180_10_ckpt_tp2"
RESUME = "--load_checkpoint ./output/checkpoint --resume_training True --callbacks.1.save_checkpoint_steps 2"


@pytest.fixture(scope="module")
def sequences(tmp_path_factory) -> Path:
    """The data that mindformers was trained on."""
    folder = tmp_path_factory.mktemp("sequences")
    subprocess.run([sys.executable, str(FIXTURES / "make_sequences.py"), str(folder)], check=True)
    return folder


def beside(name: str, folder: Path, sequences: Path, device: str, workers: int, graphs: Path | None = None) -> Run:
    """A run that finds in its folder what mindformers left there."""
    shutil.copytree(FIXTURES / name / "output", folder / "output")
    return Run(folder, str(FIXTURES / name / "config.yaml"), sequences, workers, device=device, legacy="ckpt" in name,
               graphs=graphs)


def expected(name: str, first: int, last: int) -> list[tuple[int, str, str]]:
    """(step, bits of the loss, hash of the samples of rank 0), as mindformers recorded them."""
    known = json.loads((FIXTURES / name / "losses.json").read_text(encoding="utf-8"))["uninterrupted"]
    return [(row["step"], row["hex"], row["batch"]) for row in known if first <= row["step"] <= last]


def exact(name: str, steps: list[dict]) -> bool:
    """The recorded losses and samples are those of mindformers. Of OPTIMIZER the last bit of a loss may differ: mindformers
    alone, resumed from that fixture on this CPU cluster, does not repeat it either. No step may be missing or more."""
    known = expected(name, steps[0]["step"], steps[-1]["step"])
    allowed = 1 if name == OPTIMIZER else 0
    return len(known) == len(steps) and all(
        (row["step"], row["batch"]) == (step, batch) and abs(int(row["hex"], 16) - int(bits, 16)) <= allowed
        for row, (step, bits, batch) in zip(steps, known, strict=True))


def recorded(steps: list[dict]) -> list[tuple[int, str, str]]:
    return [(row["step"], row["hex"], row["batch"]) for row in steps]


def header_of(path: Path) -> Header:
    with open(path, "rb") as file:
        return read_header(file, str(path))


@pytest.fixture(scope="module", params=[NODUP, OPTIMIZER])
def story(request, sequences, device, tmp_path_factory, graphs, soak) -> SimpleNamespace:
    name = request.param
    if name == OPTIMIZER and not soak:
        pytest.skip("takes two minutes: --soak")
    run = beside(name, tmp_path_factory.mktemp(name) / "run", sequences, device, 4, graphs)
    story = SimpleNamespace(name=name, run=run, lives=[])
    prediction = run.which()
    run.start(RESUME, CPU_CLUSTER_KILL="all@19").wait()
    story.lives.append(ended(run, prediction))
    prediction = run.which()
    story.headers = [header_of(Path(path)) for path in prediction["chosen"]["files"]]
    story.alone = copied(run, run.folder.parent / "alone") if name == OPTIMIZER else None
    run.start(RESUME).wait()
    story.lives.append(ended(run, prediction))
    return story


def test_goes_on_from_mindformers_to_the_same_losses(story):
    first = story.lives[0]
    assert first.predicted["chosen"]["step"] == 15 and first.chosen() == [15] * 4
    assert all("written by mindformers without records" in log for log in first.logs)
    assert first.trained() == [16, 17, 18, 19] and exact(story.name, first.steps), recorded(first.steps)
    assert first.status == 128 + 9 and first.committed() == [16, 18]


def test_writes_on_each_rank_what_mindformers_writes(story):
    """The share of each rank (remove_redundancy), the slice of each tensor (optimizer parallelism)."""
    for rank, ours in enumerate(story.headers):
        theirs = header_of(next((FIXTURES / story.name / "output" / "checkpoint" / f"rank_{rank}").glob("*-2_5.*")))
        assert {name: (entry.dtype, entry.shape) for name, entry in ours.tensors.items()} == {
            name: (entry.dtype, entry.shape) for name, entry in theirs.tensors.items()}
    weights = [name for name in story.headers[0].tensors if name.startswith("adam_m.")]
    shared = [name for name in weights if name in story.headers[2].tensors]           # ranks 0 and 2 are replicas
    if story.name == NODUP:
        assert weights and not shared
        assert all(header.metadata["remove_redundancy"] == "True" for header in story.headers)
    else:
        assert shared == weights != []
        assert all(header.metadata["remove_redundancy"] == "False" for header in story.headers)


def test_goes_on_from_our_own_to_the_same_losses(story):
    second = story.lives[1]
    assert second.predicted["chosen"]["step"] == 18 and second.chosen() == [18] * 4
    assert {Path(path).name.partition("-")[0][-2:] for path in second.predicted["chosen"]["files"]} == {"_1"}
    assert second.trained() == [19, 20] and exact(story.name, second.steps), recorded(second.steps)
    assert recorded(second.steps)[0] == recorded(story.lives[0].steps)[-1]           # step 19 of both lives, bit by bit
    assert second.status == 0 and second.committed() == [20]
    verify = story.run.mindresume("verify", "--json", str(story.run.checkpoints))
    states = {(row["step"], row["origin"]): row["state"] for row in json.loads(verify.stdout)["checkpoints"]}
    assert verify.returncode == 0
    assert states == {(20, "mindresume"): "verified", (18, "mindresume"): "verified", (16, "mindresume"): "verified",
                      (15, "mindformers"): "unverifiable", (10, "mindformers"): "unverifiable"}


@pytest.mark.parametrize("story", [OPTIMIZER], indirect=True)
def test_mindformers_alone_goes_on_from_our_ckpt_files(story):
    run = story.alone
    run.start(f"{RESUME} --no-mindresume").ended(ALL_RANKS_END + 200)
    assert "mindresume: " not in run.log()
    assert recorded(run.steps()) == recorded(story.lives[1].steps)


def test_goes_on_from_mindformers_1_8(sequences, device, tmp_path):
    """Another MindSpore computes other last bits, so the losses are close, not equal. The samples are the same."""
    run = beside(OLD, tmp_path / "run", sequences, device, 2)
    run.start(RESUME).ended()
    life = ended(run)
    assert life.chosen() == [15, 15]
    known = json.loads((FIXTURES / OLD / "losses.json").read_text(encoding="utf-8"))["uninterrupted"][15:20]
    assert [(row["step"], row["batch"]) for row in life.steps] == [(row["step"], row["batch"]) for row in known]
    assert life.trained() == [16, 17, 18, 19, 20]
    assert all(math.isfinite(row["loss"]) for row in life.steps)
    assert max(abs(row["loss"] - old["loss"]) for row, old in zip(life.steps, known, strict=True)) < 1e-4

"""Several processes go on from what mindformers alone wrote, die, and go on from what we wrote
beside it.

    st/fixtures ─▶ step 15 of mindformers ─▶ trains 16 to 19, saves 16 and 18 ─▶ SIGKILL to all ─▶
        resumed at 18 ─▶ the end

With --soak once with safetensors and remove_redundancy, once with ckpt and optimizer parallelism;
data parallel 2 x model parallel 2. By default what 1.8.0 wrote, tensor parallel 2. The losses are
compared with those that mindformers recorded when nothing interrupted it, and between the attempts.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.tensor_files import read_header
from mindresume.tensor_files.header import Header
from st.run_attempts import (
    ALL_RANKS_END,
    FIXTURES,
    finished_attempt,
    known_steps,
    run_beside,
    run_from_fixture,
)

pytestmark = pytest.mark.timeout(1200)
NODUP, OPTIMIZER, OLD = (
    "mf190_10_safetensors_dp2tp2_nodup",
    "mf190_10_ckpt_dp2tp2opt",
    "mf180_10_ckpt_tp2",
)
RESUME = (
    "--load_checkpoint ./output/checkpoint --resume_training True "
    "--callbacks.1.save_checkpoint_steps 2"
)


def expected(name: str, first: int, last: int) -> list[tuple[int, str, str]]:
    """(step, bits of the loss, hash of the samples of rank 0), as mindformers recorded them."""
    return [row for row in recorded(known_steps(name)) if first <= row[0] <= last]


def exact(name: str, steps: list[dict]) -> bool:
    """Checks that the recorded losses and samples equal those of mindformers. Only the last bit of
    a loss of OPTIMIZER may differ: mindformers alone, resumed from that fixture on this CPU
    cluster, does not repeat it either. No step may be missing or additional."""
    known = expected(name, steps[0]["step"], steps[-1]["step"])
    allowed = 1 if name == OPTIMIZER else 0
    return len(known) == len(steps) and all(
        (row["step"], row["batch"]) == (step, batch)
        and abs(int(row["hex"], 16) - int(bits, 16)) <= allowed
        for row, (step, bits, batch) in zip(steps, known, strict=True)
    )


def recorded(steps: list[dict]) -> list[tuple[int, str, str]]:
    return [(row["step"], row["hex"], row["batch"]) for row in steps]


def header_of(path: Path) -> Header:
    with open(path, "rb") as file:
        return read_header(file, str(path))


# by default the last test, st/test_single_convert.py, st/test_iterations.py and the judge
SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in (NODUP, OPTIMIZER)]


@pytest.fixture(scope="module", params=SOAKED)
def attempts(request, sequences, device, tmp_path_factory, graphs) -> SimpleNamespace:
    name = request.param
    run = run_from_fixture(
        name, tmp_path_factory.mktemp(name) / "run", sequences, device, 4, graphs
    )
    found = SimpleNamespace(name=name, run=run, attempts=[])
    prediction = run.which()
    run.start(RESUME, CPU_CLUSTER_KILL="all@19").wait()
    found.attempts.append(finished_attempt(run, prediction))
    prediction = run.which()
    found.headers = [header_of(Path(path)) for path in prediction["chosen"]["files"]]
    found.alone = run_beside(run, run.folder.parent / "alone") if name == OPTIMIZER else None
    run.start(RESUME).wait()
    found.attempts.append(finished_attempt(run, prediction))
    return found


def test_a_resume_from_mindformers_gives_the_same_losses(attempts):
    first = attempts.attempts[0]
    assert first.predicted["chosen"]["step"] == 15 and first.selected == [15] * 4
    assert all(
        "run_id" not in row
        for rows in first.events
        for row in rows
        if row["event"] == "checkpoint_selected"
    )
    assert first.trained() == [16, 17, 18, 19] and exact(attempts.name, first.steps), recorded(
        first.steps
    )
    assert first.status == 128 + 9 and first.committed == [16, 18]


def test_writes_on_each_rank_what_mindformers_writes(attempts):
    """The share of each rank (remove_redundancy), the slice of each tensor (optimizer
    parallelism)."""
    for rank, ours in enumerate(attempts.headers):
        theirs = header_of(
            next(
                (FIXTURES / attempts.name / "output" / "checkpoint" / f"rank_{rank}").glob(
                    "*-2_5.*"
                )
            )
        )
        assert {name: (entry.dtype, entry.shape) for name, entry in ours.tensors.items()} == {
            name: (entry.dtype, entry.shape) for name, entry in theirs.tensors.items()
        }
    weights = [name for name in attempts.headers[0].tensors if name.startswith("adam_m.")]
    # ranks 0 and 2 are replicas
    shared = [name for name in weights if name in attempts.headers[2].tensors]
    if attempts.name == NODUP:
        assert weights and not shared
        assert all(header.metadata["remove_redundancy"] == "True" for header in attempts.headers)
    else:
        assert shared == weights != []
        assert all(header.metadata["remove_redundancy"] == "False" for header in attempts.headers)


def test_a_resume_from_our_files_gives_the_same_losses(attempts):
    second = attempts.attempts[1]
    assert second.predicted["chosen"]["step"] == 18 and second.selected == [18] * 4
    assert {
        Path(path).name.partition("-")[0][-2:] for path in second.predicted["chosen"]["files"]
    } == {"_1"}
    assert second.trained() == [19, 20] and exact(attempts.name, second.steps), recorded(
        second.steps
    )
    # step 19 of both attempts, bit by bit
    assert recorded(second.steps)[0] == recorded(attempts.attempts[0].steps)[-1]
    assert second.status == 0 and second.committed == [20]
    verify = attempts.run.mindresume("verify", "--json", str(attempts.run.checkpoints))
    states = {
        (row["step"], row["origin"]): row["state"]
        for row in json.loads(verify.stdout)["checkpoints"]
    }
    assert verify.returncode == 0
    assert states == {
        (20, "mindresume"): "verified",
        (18, "mindresume"): "verified",
        (16, "mindresume"): "verified",
        (15, "mindformers"): "unverifiable",
        (10, "mindformers"): "unverifiable",
    }


@pytest.mark.parametrize("attempts", SOAKED[1:], indirect=True)
def test_mindformers_alone_resumes_from_our_ckpt_files(attempts):
    run = attempts.alone
    run.start(f"{RESUME} --no-mindresume").wait_for_success(ALL_RANKS_END + 200)
    assert run.event_files() == []
    assert recorded(run.steps()) == recorded(attempts.attempts[1].steps)


def test_a_resume_from_mindformers_1_8_works(sequences, device, tmp_path):
    """Another MindSpore computes other last bits, so the losses are close, not equal. The samples
    are the same."""
    run = run_from_fixture(OLD, tmp_path / "run", sequences, device, 2)
    run.start(RESUME).wait_for_success()
    found = finished_attempt(run)
    assert found.selected == [15, 15]
    known = known_steps(OLD)[15:20]
    assert [(row["step"], row["batch"]) for row in found.steps] == [
        (row["step"], row["batch"]) for row in known
    ]
    assert found.trained() == [16, 17, 18, 19, 20]
    assert all(math.isfinite(row["loss"]) for row in found.steps)
    assert (
        max(abs(row["loss"] - old["loss"]) for row, old in zip(found.steps, known, strict=True))
        < 1e-4
    )

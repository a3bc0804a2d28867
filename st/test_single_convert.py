"""One process goes on from what four ranks of mindformers wrote, or from merged weights:
auto_trans_ckpt in every way.

The losses are compared with those that mindformers recorded for the four ranks (or the two that
went on from its merged weights): within fp32 rounding, as sums over ranks are taken in another
order.
"""

import time
from pathlib import Path

import mindresume
from mindresume.storage import TEMPORARY
from st.run_attempts import FIXTURES, finished_attempt, known_steps, notices, run_from_fixture
from st.training_run import Run

NODUP, OPTIMIZER, UNIFIED = (
    "mf190_10_safetensors_dp2tp2_nodup",
    "mf190_10_ckpt_dp2tp2opt",
    "mf190_unified_from_dp2tp2",
)
TOLERANCE = 1e-5
SINGLE = "--use_parallel False --batch_size 8"
RESUME = (
    f"{SINGLE} --load_checkpoint ./output/checkpoint --resume_training True --auto_trans_ckpt True"
)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def distance(name: str, steps: list[dict], kind: str = "uninterrupted") -> float:
    """Largest difference to the recorded losses of the same steps."""
    known = {row["step"]: row["loss"] for row in known_steps(name, kind)}
    return max(abs(row["loss"] - known[row["step"]]) for row in steps)


def bits(steps: list[dict]) -> list[tuple[int, str]]:
    return [(row["step"], row["hex"]) for row in steps]


def test_slices_of_four_ranks_without_redundancy_are_converted(sequences, device, graphs, tmp_path):
    """Killed before its first save, the same command finds the strategy of the old job again. It
    also writes merged weights, from which mindformers alone continues."""
    run = run_from_fixture(NODUP, tmp_path / "run", sequences, device, graphs=graphs)
    before, strategies = content(run.checkpoints), content(run.folder / "output" / "strategy")
    run.start(RESUME, CPU_CLUSTER_KILL="all@17", MINDRESUME_UNIFIED_CHECKPOINT="1").wait()
    first = finished_attempt(run)
    assert (
        first.selected == [15]
        and first.trained() in ([16], [16, 17])
        and distance(NODUP, first.steps) <= TOLERANCE
    )
    assert {
        name: value for name, value in content(run.checkpoints).items() if name in before
    } == before
    (kept,) = (run.folder / "output").glob("strategy_*")
    assert {
        name: value for name, value in content(kept).items() if name in strategies
    } == strategies
    run.start(RESUME, MINDRESUME_UNIFIED_CHECKPOINT="1").wait_for_success()
    second = finished_attempt(run)
    assert second.selected == [15] and second.trained() == [16, 17, 18, 19, 20]
    assert distance(NODUP, second.steps) <= TOLERANCE and bits(second.steps)[
        : len(first.steps)
    ] == bits(first.steps)
    merged = run.folder / "output" / "unified_checkpoint"
    assert notices(run, str(merged))  # that it is there already
    assert mindresume.compare(merged, run.checkpoints, step_b=15, strategy_b=kept).equal
    alone = run.like(tmp_path / "alone")
    alone.start(
        f"{SINGLE} --load_checkpoint {merged} --resume_training True --no-mindresume"
    ).wait_for_success()
    assert alone.event_files() == []
    assert bits(alone.steps()) == bits(second.steps)


def test_merged_weights_of_mindformers_are_loaded(sequences, device, graphs, tmp_path):
    run = Run(
        tmp_path / "run",
        str(FIXTURES / NODUP / "config.yaml"),
        sequences,
        device=device,
        graphs=graphs,
    )
    merged = FIXTURES / UNIFIED / "unified_checkpoint"
    before = content(merged)
    run.start(
        f"{SINGLE} --load_checkpoint {merged}/ --resume_training True --auto_trans_ckpt True"
    ).wait_for_success()
    found = finished_attempt(run)
    assert found.selected == [15] and found.trained() == [16, 17, 18, 19, 20]
    assert distance(UNIFIED, found.steps, "resumed_tp2_by_mindformers") <= TOLERANCE
    assert content(merged) == before


def test_ckpt_files_are_transformed_once_and_loaded_later_without_conversion(
    sequences, device, graphs, tmp_path
):
    """First by MindSpore's engine, the default for ckpt; then by ours, to the same bits. The first
    start is killed within the conversion."""
    run = run_from_fixture(OPTIMIZER, tmp_path / "run", sequences, device, graphs=graphs)
    before, transformed = (
        content(run.checkpoints),
        run.folder / "output" / "transformed_checkpoint" / "checkpoint",
    )
    run.start(RESUME)
    while run.process.poll() is None and not list(transformed.parent.glob(f".*{TEMPORARY}")):
        time.sleep(0.001)
    run.kill()
    assert list(transformed.parent.glob(f".*{TEMPORARY}")) and not transformed.exists()
    run.start(RESUME, CPU_CLUSTER_KILL="all@17").wait()
    first = finished_attempt(run)
    assert list(transformed.parent.glob(f".*{TEMPORARY}")) == []
    assert first.selected == [15] and distance(OPTIMIZER, first.steps) <= TOLERANCE
    assert notices(run, str(transformed.resolve()))
    assert {
        name: value for name, value in content(run.checkpoints).items() if name in before
    } == before
    assert len(list(transformed.glob("rank_*/*.ckpt"))) == 1
    later = run.like(tmp_path / "later")
    later.start(
        f"{SINGLE} --load_checkpoint {transformed} --resume_training True"
    ).wait_for_success()
    found = finished_attempt(later)
    assert (
        found.selected == [15]
        and found.trained() == [16, 17, 18, 19, 20]
        and distance(OPTIMIZER, found.steps) <= TOLERANCE
    )
    done = run.mindresume(
        "convert",
        str(run.checkpoints),
        str(tmp_path / "direct"),
        "--to",
        "dp=1",
        "--engine",
        "direct",
        "--from",
        str(next((run.folder / "output").glob("strategy_*"))),
        "--step",
        "15",
    )
    assert done.returncode == 0, done.stderr
    assert mindresume.compare(tmp_path / "direct", transformed).equal

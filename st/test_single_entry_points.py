"""One process: the other ways to start a training with mindresume and to name its checkpoint, and
the files of weights for inference beside a checkpoint."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from st.checkpoint_files import flip_bit, names, weights
from st.run_attempts import (
    assert_event,
    assert_resumed,
    contains,
    in_parallel,
    notices,
    run_beside,
    steps_of,
    train_well,
    use_program,
    use_register_path,
)
from st.training_run import Run

EXTRA = (
    "--callbacks.1.save_network_params True --callbacks.1.save_trainable_params True "
    "--callbacks.1.save_checkpoint_steps 1 --callbacks.1.keep_checkpoint_max 2"
)


@pytest.fixture(scope="module")
def started(whole_single, tmp_path_factory) -> SimpleNamespace:
    """Each continues from step 35 of the uninterrupted run: step 40 is damaged, or the file of step
    35 is requested, beside a name that does not count then."""
    base = tmp_path_factory.mktemp("ways")
    unmodified, python = (
        run_beside(whole_single, base / name) for name in ("unmodified", "python")
    )
    register = use_register_path(unmodified)
    use_program(python, "python_style.py")
    for run in (unmodified, python):
        flip_bit(weights(run, 40))
    extra = run_beside(whole_single, base / "extra", copied=False)
    in_parallel(
        lambda: train_well(unmodified, register),
        lambda: train_well(python),
        lambda: train_well(
            extra,
            f"--load_checkpoint {weights(whole_single, 35)}",
            "--resume_training qwen3_rank_0-3_10.safetensors",
            EXTRA,
        ),
    )
    return SimpleNamespace(unmodified=unmodified, python=python, extra=extra)


def resumed_and_saved(run: Run, whole: Run) -> None:
    assert_event(run, "candidate_refused", step=40, file=contains("qwen3_rank_0-4_10.safetensors"))
    assert_resumed(run, whole, 35)
    assert names(run, 2) == {40: "qwen3_rank_0_1-4_10.safetensors"}
    found = run.which()
    chosen = [
        found["chosen"][key]
        for key in ("step", "epoch", "format", "missing_ranks", "files", "warnings")
    ]
    assert (
        chosen == [40, 4, "safetensors", [], [str(weights(run, 40))], []] and found["refused"] == []
    )


def test_an_unmodified_script_with_register_path(started, whole_single):
    assert "mindresume" not in started.unmodified.program.read_text(encoding="utf-8").lower()
    resumed_and_saved(started.unmodified, whole_single)


def test_an_import_in_python(started, whole_single):
    resumed_and_saved(started.python, whole_single)


def test_complete_already(started):
    """The same command once more: nothing to train, nothing saved, exit status 0."""
    run = started.python
    files = [path for path in run.checkpoints.rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    train_well(run)
    assert steps_of(run) == []
    assert_event(
        run,
        "training_ended",
        outcome="nothing_to_train",
        reason=contains("step 40", "runner_config.epochs"),
    )
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_file_and_a_name_ignores_the_name_and_warns(started, whole_single):
    assert_resumed(started.extra, whole_single, 35)
    (_,) = notices(
        started.extra,
        "qwen3_rank_0-3_10.safetensors",
        str(weights(whole_single, 35)),
        level="warning",
    )


# ---- weights for inference -----------------------------------------------------------------------


def test_mindspore_reads_them_and_they_are_the_weights_of_the_step(started, whole_single):
    output = started.extra.folder / "output"
    code = (
        "import sys, mindspore as ms\n"
        "whole, *others = (ms.load_checkpoint(path, format='safetensors') for path in "
        "sys.argv[1:])\n"
        "for other in others:\n"
        "    assert len(other) > 10 and not [name for name in other if name.startswith('adam_')], "
        "sorted(other)\n"
        "    wrong = [n for n in other if other[n].asnumpy().tobytes() != "
        "whole[n].asnumpy().tobytes()]\n"
        "    assert not wrong, wrong\n"
        "moments = [name for name in whole if name.startswith('adam_m.')]\n"
        "assert sorted(others[1]) == sorted(name.removeprefix('adam_m.') for name in moments)\n"
        "assert set(others[1]) <= set(others[0])\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            str(weights(whole_single, 40)),
            str(output / "checkpoint_network" / "rank_0" / "qwen3_rank_0-network-4_10.safetensors"),
            str(
                output
                / "checkpoint_trainable"
                / "rank_0"
                / "qwen3_rank_0-trainable_params-4_10.safetensors"
            ),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""The step ledger of a training on rank 0, and what a resume says about the steps done again."""

import io
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from mindresume.errors import ResumeDifferenceError  # noqa: E402
from mindresume.events import ResumeDiffers, ResumeProved  # noqa: E402
from mindresume.mindformers import adapter, step_proof  # noqa: E402
from mindresume.mindformers.step_proof import Computation, SeenValues, StepProof  # noqa: E402
from mindresume.resume.progress import START  # noqa: E402
from mindresume.resume.step_ledger import StepRow, read_ledger  # noqa: E402
from mindresume.settings import Settings  # noqa: E402


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """begin(run, resumed, **changes of the counters): a training on rank 0, and its events."""
    monkeypatch.setattr(adapter, "output_root", lambda: str(tmp_path))
    monkeypatch.setattr(
        step_proof,
        "ledger_path",
        lambda folder: f"{folder}/{len(made)}-rank_0-1.steps",
    )
    made: list[StepProof] = []

    def run(
        name,
        resumed=0,
        settings=None,
        computation=None,
        saved_by="0001-aaaaaaaa",
        chosen=None,
        **origin,
    ):
        found = []
        context = SimpleNamespace(
            emit=found.append,
            computation=computation or Computation("layout", "float32"),
            seen=SeenValues(),
            plan=SimpleNamespace(
                resumes=resumed > 0,
                origin=SimpleNamespace(
                    chosen=SimpleNamespace(
                        step=resumed if chosen is None else chosen, run=saved_by
                    ),
                    checkpoint_dir=str(tmp_path / "checkpoint"),
                ),
            ),
            progress=SimpleNamespace(origin=replace(START, **origin)),
            settings=settings or Settings(),
            resources=SimpleNamespace(proved={"tensors": 33}),
        )
        target = SimpleNamespace(run=name, lineage="0001-aaaaaaaa", world_size=1)
        made.append(StepProof(context, target, resumed))
        return made[-1], found

    yield run
    for proof in made:
        proof.close()


ALL = ("batch", "epoch", "learning_rate", "loss", "loss_scale", "samples")


def rows(first, last, **values):
    return [
        StepRow(step, 1, step * 8, step, 1e-4, 1.0, 5 - step / 100)._replace(**values)
        for step in range(first, last + 1)
    ]


def train(proof, steps):
    for row in steps:
        proof.end_step(row)


def test_weights_that_are_not_compared_are_said(begin):
    first, _ = begin("0001-aaaaaaaa")
    train(first, rows(1, 12))
    first.close()
    again, events = begin("0002-bbbbbbbb", 10, Settings(proof="off"))
    again.context.resources.proved = {"tensors": 0, "weight_bytes": 1 << 31}
    train(again, rows(11, 12))
    reason = "the weights are not compared (proof: off)"
    assert events == [ResumeProved(10, 0, 2, 2, 0, 0.0, ALL, reason, weight_bytes=1 << 31)]
    assert (
        events[0].line().startswith("resume compared: 2 of 2 steps") and reason in events[0].line()
    )


def test_the_steps_done_again_are_compared_and_the_result_is_said_once(begin, tmp_path):
    first, events = begin("0001-aaaaaaaa")
    train(first, rows(1, 14))
    first.close()
    assert events == []
    again, events = begin("0002-bbbbbbbb", 10)
    train(again, rows(11, 13))
    assert events == []
    train(again, rows(14, 20))
    assert events == [ResumeProved(10, 33, 4, 4, 0, 0.0, ALL)]
    with open(tmp_path / "mindresume_events" / "2-rank_0-1.steps", "rb") as file:
        assert list(read_ledger(file, "its ledger").rows) == list(range(11, 21))


def test_the_copy_for_a_save_ends_with_the_step_of_the_save(begin):
    proof, events = begin("0001-aaaaaaaa")
    for row in rows(1, 3):  # a step is saved before it is recorded
        copied = read_ledger(io.BytesIO(proof.copy(row)), "the copy")
        assert list(copied.rows) == list(range(1, row.step + 1))
        assert copied.rows[row.step] == row and copied.run.run_id == "0001-aaaaaaaa"
        proof.end_step(row._replace(loss=9.0))
    # the last save of a training comes after the step
    copied = read_ledger(io.BytesIO(proof.copy(rows(3, 3)[0])), "the copy")
    assert list(copied.rows) == [1, 2, 3] and copied.rows[3].loss == 9.0
    assert events == []


def test_a_ledger_that_cannot_be_made_is_not_copied(begin, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    proof, events = begin("0001-aaaaaaaa")
    monkeypatch.setattr(step_proof, "StepLedger", refuse)
    assert proof.copy(rows(1, 1)[0]) == proof.copy(rows(2, 2)[0]) == b""
    assert len(events) == 1


def test_the_first_difference_is_said_and_all_are_counted(begin):
    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    again, events = begin("0002-bbbbbbbb", 10)
    train(again, rows(11, 11) + rows(12, 14, batch=77))
    differs, proved = events
    assert (differs.step, differs.what, differs.first_run) == (12, "batch", "0001-aaaaaaaa")
    assert "batch 12," in differs.first and "batch 77," in differs.again
    assert (proved.steps, proved.differences) == (4, 3)


def test_a_difference_ends_the_job_if_the_settings_say_so(begin):
    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    again, events = begin("0002-bbbbbbbb", 10, Settings(on_resume_difference="stop"))
    with pytest.raises(ResumeDifferenceError, match="step 11 .* another loss"):
        train(again, rows(11, 12, loss=1.0))
    assert [type(event) for event in events] == [ResumeDiffers]


@pytest.mark.parametrize(
    "origin, reason",
    [
        ({}, "no step is done again"),
        ({"step_scale": 0.5}, "batch size has changed"),
        ({"moved_passes": 1}, "the data has changed"),
        ({"skipped": 8}, "the data has changed"),
        ({"repeated": 8}, "the data has changed"),
        ({"changed": ("other data",)}, "the data has changed"),
        ({"starts_data_set": True}, "the data has changed"),
    ],
)
def test_that_no_step_is_compared_is_said_after_the_first(begin, origin, reason):
    train(begin("0001-aaaaaaaa")[0], rows(1, 14 if origin else 10))
    again, events = begin("0002-bbbbbbbb", 10, **origin)
    assert events == []
    train(again, rows(11, 12, batch=77))
    (proved,) = events
    assert proved.steps == 0 and proved.tensors == 33 and reason in proved.unproved


@pytest.mark.parametrize("change", [{"changed": ("other data",)}, {"step_scale": 0.5}])
def test_a_change_that_is_taken_back_is_no_difference(begin, change):
    """The run in between saved nothing, and trained these steps with other data."""
    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    train(begin("0002-bbbbbbbb", 10, **change)[0], rows(11, 13, batch=77))
    again, events = begin("0003-cccccccc", 10)
    train(again, rows(11, 14))
    (proved,) = events
    assert proved.steps == 0 and "a run since then had other data" in proved.unproved


def test_a_run_that_began_with_other_data_is_compared_after_a_checkpoint_of_its_own(begin):
    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    train(begin("0002-bbbbbbbb", 8, changed=("other data",))[0], rows(9, 13, batch=77))
    again, events = begin("0003-cccccccc", 10, saved_by="0002-bbbbbbbb")
    train(again, rows(11, 14, batch=77))
    (proved,) = events
    assert (proved.steps, proved.differences) == (3, 0)


def test_a_training_that_ends_early_says_how_many_steps_were_compared(begin):
    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    again, events = begin("0002-bbbbbbbb", 10)
    train(again, rows(11, 12))
    again.close()
    assert events == [ResumeProved(10, 33, 2, 4, 0, 0.0, ALL, "then the training ended")]


def test_a_ledger_that_does_not_reach_back_is_said_at_once(begin):
    train(begin("0001-aaaaaaaa")[0], rows(12, 14))
    again, events = begin("0002-bbbbbbbb", 10)
    train(again, rows(11, 14))
    (proved,) = events
    assert (proved.steps, proved.unproved) == (
        0,
        "no step is compared: the step ledger has no step 11",
    )


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a defect")])
def test_what_goes_wrong_in_the_proof_ends_no_training(begin, monkeypatch, error):
    def refuse(*_):
        raise error

    train(begin("0001-aaaaaaaa")[0], rows(1, 14))
    again, events = begin("0002-bbbbbbbb", 10)
    monkeypatch.setattr(step_proof.StepLedger, "add", refuse)
    train(again, rows(11, 14))
    again.close()
    (notice,) = events
    assert str(error) in notice.line() and "no step is compared" in notice.line()


def test_a_ledger_that_cannot_be_looked_for_ends_no_training(begin, monkeypatch):
    """Rank 0 alone looks, and the other ranks wait for it."""

    def refuse(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(step_proof, "earlier_ledger", refuse)
    again, events = begin("0002-bbbbbbbb", 10)
    train(again, rows(11, 14))
    again.close()
    (notice,) = events
    assert "a defect" in notice.line() and again.lost_steps == 0


def test_a_run_without_a_step_has_no_ledger(begin, tmp_path):
    begin("0001-aaaaaaaa")[0].close()
    assert not (tmp_path / "mindresume_events").exists()


@pytest.mark.parametrize(
    "restored, dropouts, compares",
    [
        (True, {"hidden_dropout"}, True),
        (False, {"hidden_dropout"}, False),
        (True, {"hidden_dropout", "attention_dropout"}, False),
        (False, set(), True),
    ],
)
def test_the_loss_is_compared_only_if_what_is_drawn_continues(begin, restored, dropouts, compares):
    computation = Computation("layout", "float32", frozenset(dropouts))
    train(begin("0001-aaaaaaaa", computation=computation)[0], rows(1, 14))
    again, events = begin("0002-bbbbbbbb", 10, computation=computation)
    again.continue_random(restored)
    train(again, rows(11, 14))
    assert ("loss" in events[-1].compared) is compares


# ---- no false alarm ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint. ``way``: all changes that led to it; losses depend on it."""

    step: int
    run: str
    batch: int
    data: str
    samples: int
    way: tuple


@pytest.mark.parametrize("seed", range(6))
def test_no_resume_that_is_right_differs(begin, seed):
    """40 runs of one training: killed anywhere, also while they save; each continues one of the
    newest three checkpoints with the same data, batch size and layout as it, or with others."""
    draw, saved, compared = random.Random(seed), [Saved(0, "0001-00000000", 8, "a", 0, ())], 0
    for number in range(1, 41):
        name, chosen = f"{number:04d}-00000000", saved[-1]
        if draw.random() < 0.2:
            chosen = draw.choice(saved[-3:])
        changes = draw.random() < 0.3
        batch = draw.choice([4, 8, 16]) if changes else chosen.batch
        data = draw.choice("ab") if changes else chosen.data
        first, left = divmod(chosen.step * chosen.batch, batch)
        layout, way = draw.choice(["x", "y", "x"]), chosen.way
        if (batch, data) != (chosen.batch, chosen.data):
            way += ((batch, data, chosen.samples),)
        proof, events = begin(
            name,
            first,
            computation=Computation(layout, "float32"),
            saved_by=chosen.run,
            chosen=chosen.step,
            step_scale=chosen.batch / batch,
            repeated=left,
            changed=("other data",) * (data != chosen.data),
        )
        every = draw.randint(2, 6)
        for step in range(first + 1, first + draw.randint(2, 12)):
            samples = chosen.samples + (step - first) * batch
            loss = 1 + random.Random(f"{way} {samples}").random()
            rate = 1 / (1 + step * batch)
            row = StepRow(step, layout == "x", samples, hash((samples, layout, way)) & 0xFF, rate)
            proof.end_step(row._replace(loss=loss))
            if step % every == 0 and draw.random() < 0.8:
                saved.append(Saved(step, name, batch, data, samples, way))
        proof.close()
        assert [event for event in events if isinstance(event, ResumeDiffers)] == [], number
        compared += sum(event.steps for event in events)
    assert compared > 20


# ---- what the host sees --------------------------------------------------------------------------


def batch_of(*arrays):
    seen = SeenValues()
    seen.batch(arrays)
    return seen.row(1, 1, 8).batch


def test_each_number_of_a_batch_counts_also_at_the_edges_of_a_large_one():
    small, large = np.arange(64).reshape(8, 8), np.arange(1 << 20, dtype=np.int32)
    for array, places in ((small, range(64)), (large, (0, 4000, (1 << 20) - 1))):
        for place in places:
            other = array.copy()
            other.reshape(-1)[place] += 1
            assert batch_of(array) != batch_of(other), place
    assert batch_of(small, large) == batch_of(small, large) != batch_of(large, small)


@pytest.mark.parametrize("batch", [[(np.arange(2), None)], [None], [{}], [object()]])
def test_an_input_of_another_kind_is_not_compared_and_stops_nothing(batch):
    seen = SeenValues()
    for step in (1, 2):
        seen.batch(batch)
        seen.batch([np.arange(3)])
        assert seen.row(step, 1, 8) == StepRow(step, 1, 8)
        seen.clear()


def test_what_was_seen_belongs_to_one_step():
    seen = SeenValues()
    seen.batch([np.arange(8)])
    seen.batch([np.arange(8)])
    seen.monitor(loss=np.float32(2.5), loss_scale="unavailable", learning_rate=None)
    row = seen.row(1, 2, 8)
    assert row.batch not in (None, batch_of(np.arange(8)))
    assert row == StepRow(1, 2, 8, row.batch, loss=2.5) == seen.row(1, 2, 8)
    seen.clear()
    assert seen.row(2, 2, 16) == StepRow(2, 2, 16)


@pytest.mark.parametrize(
    "value, number",
    [
        (np.array([1.0, 2.0]), 1.5),
        (np.array(3, np.int32), 3.0),
        (False, None),
        ("unavailable", None),
        (np.array([]), None),
        (np.array(True), None),
    ],
)
def test_numbers_of_the_monitor(value, number):
    seen = SeenValues()
    seen.monitor(loss=value)
    assert seen.row(1, None, None).loss == number


# ---- what losses depend on -----------------------------------------------------------------------

CONFIG = {
    "parallel": {"parallel_mode": 1, "strategy_ckpt_save_file": "/a/output/strategy"},
    "parallel_config": {"data_parallel": 2, "model_parallel": 2},
    "runner_config": {"batch_size": 4, "epochs": 3},
    "model": {"model_config": {"compute_dtype": "bfloat16"}},
}


def test_the_layout_is_the_same_wherever_files_lie_and_however_long_the_training_is():
    moved = {
        **CONFIG,
        "parallel": {"parallel_mode": 1, "strategy_ckpt_save_file": "/b/output/strategy"},
        "runner_config": {"batch_size": 4, "epochs": 9, "sink_size": 3},
    }
    assert Computation.of(CONFIG) == Computation.of(moved)


@pytest.mark.parametrize(
    "section, values",
    [
        ("parallel", {"parallel_mode": 2}),
        ("parallel_config", {"data_parallel": 4, "model_parallel": 1}),
        ("runner_config", {"batch_size": 8}),
        ("runner_config", {"batch_size": 4, "sink_mode": True}),
        ("training", {"local_batch_size": 2}),
    ],
)
def test_another_layout_is_noticed(section, values):
    assert Computation.of({**CONFIG, section: values}).layout != Computation.of(CONFIG).layout


@pytest.mark.parametrize(
    "config, skips",
    [
        ({"runner_wrapper": {"scale_sense": {"loss_scale_value": 1024, "scale_window": 2}}}, True),
        ({"runner_wrapper": {"scale_sense": 1.0}}, False),
        ({"training": {"use_skip_step_on_nan": True}}, True),
        ({}, False),
    ],
)
def test_overflows_are_normal_with_a_dynamic_loss_scale(config, skips):
    assert Computation.of(config).skips_overflow == skips


@pytest.mark.parametrize(
    "model, dtype, dropouts",
    [
        ({"model_config": {"compute_dtype": "bfloat16"}}, "bfloat16", set()),
        (
            {"compute_dtype": "FP32", "hidden_dropout": 0.1, "attention_dropout": 0.0},
            "float32",
            {"hidden_dropout"},
        ),
        ({"model_config": "x"}, "", set()),
        ([], "", set()),
        (None, "", set()),
    ],
)
def test_the_model_of_both_trainers_and_sections_of_another_type(model, dtype, dropouts):
    found = Computation.of({"model": model, "runner_config": 5})
    assert (found.dtype, found.dropouts) == (dtype, dropouts)

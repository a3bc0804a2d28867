"""Streaming data of Hugging Face continues at its saved position, or the resume is refused."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("mindformers.tools")
from datasets import IterableDataset  # noqa: E402
from mindformers.dataset.dataloader.hf_dataloader import (
    HFIterableDataset,
    _resume_hf_iterable_dataset,
)  # noqa: E402

from mindresume.errors import CollectiveError, ProgressError  # noqa: E402
from mindresume.mindformers import counters, patches  # noqa: E402
from mindresume.model.training_state import DataPosition  # noqa: E402
from mindresume.resume.progress import ResumeProgress  # noqa: E402

SAMPLES, BATCH = 20, 2  # 10 steps a pass


def samples():
    for number in range(SAMPLES):
        yield {"input_ids": [number], "labels": [number]}


def reader(folder, batch=BATCH):
    """Returns mindformers' own reader, in a pipeline as mindspore's datasets form it."""
    config = SimpleNamespace(
        size=SAMPLES,
        dataset_state_dir=str(folder),
        save_step=1,
        resume_step=None,
        batch_size=batch,
        process=None,
        create_compressed_eod_mask=False,
        compressed_eod_mask_length=128,
    )
    source = HFIterableDataset(config, IterableDataset.from_generator(samples), None, None)
    return SimpleNamespace(
        children=[SimpleNamespace(source=source)], get_dataset_size=lambda: SAMPLES // batch
    ), source


def read(source, skip, steps, batch=BATCH):
    """Reads samples after ``skip`` steps as mindspore does, by their numbers in a pass."""
    numbers = [number % SAMPLES for number in range(skip * batch, (skip + steps) * batch)]
    return [source[number][0][0] for number in numbers]


@pytest.fixture
def states(tmp_path):
    """Returns the states of two passes."""
    read(reader(tmp_path)[1], 0, 20)
    return tmp_path


def at(skip, begins=False):
    return ResumeProgress(99, 9, 99, 1.0, DataPosition(0, 0), skip, starts_data_set=begins)


def gone_on(dataset, progress, current):
    """Continues through the hook; the step of the training is 99."""
    current.progress.origin, current.plan = progress, SimpleNamespace(resumes=True)
    patches.WRAPPERS["_resume_hf_iterable_dataset"](_resume_hf_iterable_dataset)(dataset, 99)


@pytest.mark.parametrize("skip", [1, 3, 9, 10, 11, 13, 20])
def test_a_stream_continues_at_its_position(states, current, skip):
    """Also between two passes, where mindformers returns the first sample forever; later states
    have the right names."""
    dataset, source = reader(states)
    gone_on(dataset, at(skip), current)
    assert read(source, skip, 9) == [
        number % SAMPLES for number in range(skip * BATCH, (skip + 9) * BATCH)
    ]
    assert source.global_step == skip + 9


def test_a_new_data_set_starts_with_its_first_sample(states, current):
    """mindformers jumps to the old place behind the first sample."""
    dataset, source = reader(states)
    gone_on(dataset, at(0, begins=True), current)
    assert read(source, 0, 5) == list(range(10)) and source.global_step == 5


@pytest.mark.parametrize(
    "skip, batch, match",
    [
        (
            2,
            4,
            "step_2/dataset_state_rank0.json: the state of the streaming data set is of another "
            "position: {'cur_epoch': 1, 'cur_step': 2, 'cur_iter': 4}, expected {'cur_epoch': 1, "
            "'cur_step': 2, 'cur_iter': 8}",
        ),
        (
            25,
            2,
            "step_25/dataset_state_rank0.json: the state .* after 25 steps cannot be read "
            ".FileNotFoundError",
        ),
    ],
)
def test_a_state_that_is_not_of_the_place_is_an_error(states, current, skip, batch, match):
    dataset, source = reader(states, batch)
    with pytest.raises(CollectiveError, match=match):
        gone_on(dataset, at(skip), current)
    assert source.resume_step is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", json.dumps({"_train_state": {"cur_epoch": 1}})]
)
def test_a_damaged_state_is_an_error(states, content):
    (states / "step_3" / "dataset_state_rank0.json").write_text(content)
    with pytest.raises(ProgressError, match="cannot be read"):
        counters.resume_streaming(reader(states)[0], at(3))


def test_steps_of_it_cannot_be_skipped(states):
    for run in (
        lambda data: counters.resume_streaming(data, at(3, begins=True)),
        lambda data: counters.refuse_skip(data, 3),
    ):
        with pytest.raises(
            ProgressError,
            match="data_skip_steps: 3 steps of a streaming data set .* cannot be skipped",
        ):
            run(reader(states)[0])
    counters.refuse_skip(reader(states)[0], 0)


def test_other_data_is_left_alone():
    for dataset in (
        SimpleNamespace(children=[SimpleNamespace(source=[1, 2])]),
        SimpleNamespace(children=[]),
        None,
    ):
        counters.resume_streaming(dataset, at(3))
        counters.refuse_skip(dataset, 3)

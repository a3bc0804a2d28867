"""Whole trainings through the wrappers, in this process: a resume ends with the bits of a training
that nothing interrupts."""

import json
import shutil
import sys

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

import iteration_folders  # noqa: E402
import mindspore as ms  # noqa: E402
from fakes import moxing  # noqa: E402
from pynative_trainers import BATCH, BuiltIn, DataSet, Model, Trainer  # noqa: E402
from senders import from_outside  # noqa: E402

from mindresume.errors import AlteredWeightsError, CollectiveError, ConfigError  # noqa: E402
from mindresume.formats.iterations import TRACKER  # noqa: E402
from mindresume.mindformers import adapter, configuration, training_context  # noqa: E402
from mindresume.mindformers.pynative import checkpoint_load  # noqa: E402
from mindresume.model.manifest import FOLDER, MANIFEST  # noqa: E402
from mindresume.storage.object_store import MoxingStore  # noqa: E402


def events(tmp_path, kind):
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "output").rglob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [row for row in rows if row["event"] == kind]


def folders(root):
    return sorted(int(path.name.split("_")[1]) for path in root.glob("iteration_*"))


def run(steps, root, resume=False, **options):
    """Returns a trainer after its training, with random numbers that begin where a new process
    begins."""
    np.random.seed(7)
    trainer = Trainer(steps, save_path=str(root), load_path=str(root) if resume else "", **options)
    trainer.result = trainer.train()
    return trainer


def interrupted(root, at, **options):
    with pytest.raises(RuntimeError, match=f"step {at}"):
        run(20, root, fails_at=at, **options)


def test_a_folder_that_does_not_exist_or_is_empty_is_a_fresh_start(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        trainer = run(4, tmp_path / name, resume=True)
        assert min(trainer.losses) == 1 and trainer.loaded_by_mindformers == []


class Loader:
    """A callback of the user that loads weights of its own."""

    def __init__(self, event):
        for name in ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
            setattr(self, name, self._load if name == event else lambda *_, **__: None)

    def _load(self, args, state, model, **_):
        model.parameters_dict()["weight"].set_data(ms.Tensor(np.full(3, 7, np.float32)))


class Grows(Loader):
    """Reads one sample more in each step, as a batch size that grows: so common.json has
    consumed_samples."""

    def __init__(self, trainer):
        super().__init__("on_step_begin")
        self.trainer = trainer

    def _load(self, *_, **__):
        self.trainer._consumed_samples += 1


def test_the_last_step_of_a_complete_training_is_published_and_uploaded(tmp_path, monkeypatch):
    """The run before died before the manifest."""
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))
    monkeypatch.setenv("MA_JOB_DIR", "/home/ma-user/modelarts")
    monkeypatch.setattr(configuration, "MoxingStore", lambda: MoxingStore(moxing.file))
    root, uploads = tmp_path / "run", {"remote_save_url": "obs://bucket/job"}
    trainer = Trainer(8, save_path=str(root), micro_batches=2, sections=uploads)
    trainer.callback_handler.callbacks.append(Grows(trainer))
    trainer.train()
    whole = (root / "iteration_00000008" / "common.json").read_bytes()
    folder = iteration_folders.unname(root, 8, events(tmp_path, "run_opened")[0]["run_id"])
    iteration_folders.track(root, 4)
    iteration_folders.intend(root, 8)
    next(folder.glob(f"{FOLDER}/*/{MANIFEST}")).unlink()
    (folder / "common.json").unlink()
    shutil.rmtree(tmp_path / "objects")
    again = run(8, root, resume=True, micro_batches=2, sections=uploads)
    assert again.losses == {} and folders(root) == [4, 8] and iteration_folders.tracker(root) == "8"
    assert (root / "iteration_00000008" / "common.json").read_bytes() == whole
    assert b"consumed_samples" in whole and len(list((tmp_path / "objects").rglob(MANIFEST))) == 1
    assert events(tmp_path, "training_ended")[-1]["outcome"] == "nothing_to_train"


def test_the_same_trainer_trains_twice(tmp_path):
    """The second training resumes what the first has saved, and nothing of the first is left."""
    trainer = Trainer(8, save_path=str(tmp_path / "run"), load_path=str(tmp_path / "run"))
    trainer.train()
    trainer.sections["training"]["steps"] = 12
    trainer.train()
    assert sorted(trainer.losses) == list(range(1, 13)) and trainer.train_dataset.began == [0, 0, 2]
    assert folders(tmp_path / "run") == [4, 8, 12]
    assert training_context.current().run is None and not hasattr(trainer, "_mindresume_run")


@pytest.mark.parametrize("event, saves", [("on_train_begin", True), ("on_step_begin", False)])
def test_a_callback_that_loads_weights_of_its_own_ends_the_training_before_a_step(
    tmp_path, event, saves
):
    """Whether the training saves, and also behind our callback."""
    interrupted(tmp_path / "run", 6)
    with pytest.raises(
        AlteredWeightsError, match="1 of 2 tensors are not what was loaded: weight.*Loader"
    ):
        run(20, tmp_path / "run", resume=True, callbacks=[Loader(event)], enable_save=saves)
    assert events(tmp_path, "training_ended")[-1]["outcome"] == "failed" and folders(
        tmp_path / "run"
    ) == [4]
    resumed = run(20, tmp_path / "run", resume=True, callbacks=[Loader("none")], enable_save=saves)
    assert min(resumed.losses) == 5


def test_outside_of_a_training_mindformers_loads_and_reads():
    """For example ``Trainer.inference``."""
    trainer = Trainer(4)
    trainer._load_checkpoint("/weights", trainer.model)
    trainer.train_dataset.set_init_step(2)
    trainer._create_dataset_iterator(trainer.train_dataset)
    assert trainer.loaded_by_mindformers == ["/weights"] and trainer.train_dataset.began == [2]


def test_the_stages_of_a_pipeline_are_loaded_once(tmp_path):
    """mindformers 2.0.0 asks once for each stage."""
    run(4, tmp_path / "run", model=Model("weight", "other"))
    trainer = Trainer(
        6,
        save_path=str(tmp_path / "run"),
        load_path=str(tmp_path / "run"),
        model=Model("weight", "other"),
    )
    load, calls = trainer._load_checkpoint, []

    def each_stage(path, model, optimizer=None):
        for stage in (model, model):
            calls.append(load(path, stage, optimizer))

    trainer._load_checkpoint = each_stage
    trainer.train()
    assert len(calls) == 2 and sorted(trainer.losses) == [5, 6]
    assert len(events(tmp_path, "resumed")) == 1 and trainer.train_dataset.began == [4]


def test_weights_alone_start_at_step_0(tmp_path):
    run(8, tmp_path / "run")
    before, seen = run(8, tmp_path / "other").weight, []

    class Look(BuiltIn):
        def on_train_begin(self, *_, model, **__):
            seen.append(model.parameters_dict()["weight"].asnumpy().copy())

    trainer = Trainer(
        2,
        save_path=str(tmp_path / "new"),
        load_path=str(tmp_path / "run"),
        no_load_optim=True,
        callbacks=[Look()],
    )
    trainer.train()
    assert seen[0].tobytes() == before.tobytes()
    assert sorted(trainer.losses) == [1, 2] and trainer.train_dataset.began == [0]


def test_a_resume_without_saves_restores_the_random_state_and_releases_the_checkpoint(tmp_path):
    whole = run(12, tmp_path / "whole")
    interrupted(tmp_path / "run", 10)
    locks = []

    class Watched(DataSet):
        def create_dict_iterator(self, **_):
            locks.append(training_context.current().resources.read_lock)
            return super().create_dict_iterator()

    trainer = run(12, tmp_path / "run", resume=True, enable_save=False, dataset=Watched(BATCH))
    assert trainer.losses == {step: row for step, row in whole.losses.items() if step > 8}
    assert locks == [None]
    assert [event["step"] for event in events(tmp_path, "resumed")] == [8]


# ---- what is refused -----------------------------------------------------------------------------


def test_what_the_checkpoint_lacks_is_named(tmp_path):
    run(8, tmp_path / "run", no_save_optim=True)
    with pytest.raises(CollectiveError, match="optimizer.*no_load_optim: True"):
        run(12, tmp_path / "run", resume=True)
    with pytest.raises(CollectiveError, match="bias is not in the checkpoint"):
        run(12, tmp_path / "run", resume=True, model=Model("weight", "bias"))


@pytest.mark.parametrize(
    "key, ignored",
    [
        ("use_contiguous_weight_layout_attention", True),
        ("use_interleaved_weight_layout_mlp", False),
    ],
)
def test_another_order_within_a_tensor_is_refused(tmp_path, key, ignored):
    run(4, tmp_path / "run")
    with pytest.raises(ConfigError, match=f"model.{key} is {ignored}"):
        run(8, tmp_path / "run", resume=True, sections={"model": {key: ignored}})
    trainer = run(8, tmp_path / "run", resume=True, sections={"model": {key: not ignored}})
    assert min(trainer.losses) == 5


def test_a_data_set_that_cannot_skip_is_refused(tmp_path):
    class Streaming:
        items, began = DataSet(BATCH).items, []

        def create_dict_iterator(self, **_):
            return iter(self.items)

    # ends between two passes: nothing to skip
    run(6, tmp_path / "whole", dataset=Streaming())
    assert min(run(8, tmp_path / "whole", resume=True, dataset=Streaming()).losses) == 7
    with pytest.raises(ConfigError, match="Streaming.*ignore_data_skip"):
        run(12, tmp_path / "whole", resume=True, dataset=Streaming())


def test_a_checkpoint_of_a_network_with_another_order_is_refused(tmp_path, monkeypatch):
    """As the graph trainer records it; ``arrangement`` has the rules."""
    key = "use_interleaved_weight_layout_mlp"
    with monkeypatch.context() as graph:
        graph.setitem(adapter.ARRANGEMENT, key, False)
        run(4, tmp_path / "run")
    with pytest.raises(ConfigError, match=f"{tmp_path / 'run'}.*{key}: False, this one True"):
        run(8, tmp_path / "run", resume=True)
    assert folders(tmp_path / "run") == [4]


def test_two_callbacks_that_save_into_the_same_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for same in (tmp_path / "elsewhere" / ".." / "run", tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"save into {tmp_path / 'run'}"):
            run(4, tmp_path / "run", callbacks=[BuiltIn(save_path=str(same))])
    run(4, tmp_path / "run", callbacks=[BuiltIn(save_path=str(tmp_path / "elsewhere"))])


def test_hugging_face_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_load, "is_pretrained", lambda storage, path: True)
    monkeypatch.delattr(
        sys.modules[checkpoint_load.PYNATIVE_TRAINER], "is_hf_checkpoint", raising=False
    )
    with pytest.raises(ConfigError, match=f"{tmp_path} holds Hugging Face weights.*2.1.0"):
        run(4, tmp_path, resume=True)
    monkeypatch.setattr(
        sys.modules[checkpoint_load.PYNATIVE_TRAINER], "is_hf_checkpoint", True, raising=False
    )
    assert run(4, tmp_path, resume=True).loaded_by_mindformers == [str(tmp_path)]


def test_adapters_on_a_base_are_left_to_mindformers(tmp_path):
    trainer = run(
        4, tmp_path / "run", resume=True, base_load_path="/base", save_trainable_only=True
    )
    assert (
        trainer.loaded_by_mindformers == [str(tmp_path / "run")] and not (tmp_path / "run").exists()
    )
    assert trainer.callback_handler.callbacks[0].events == ["begin", *["step"] * 4, "end"]


# ---- saves ---------------------------------------------------------------------------------------


def test_due_steps_the_last_one_and_retention(tmp_path):
    trainer = run(18, tmp_path / "run", save_max=2)
    assert (
        folders(tmp_path / "run") == [16, 18] and (tmp_path / "run" / TRACKER).read_text() == "18"
    )
    assert trainer.callback_handler.callbacks[0].events == []
    assert [event["step"] for event in events(tmp_path, "save_committed")] == [4, 8, 12, 16, 18]


def test_a_request_to_stop_saves_the_step_and_ends(tmp_path):
    class Asks(BuiltIn):
        def on_step_end(self, args, state, **kwargs):
            if state.global_step == 5:
                from_outside()

    np.random.seed(7)
    trainer = Trainer(20, callbacks=[Asks()], save_path=str(tmp_path / "run"))
    with pytest.raises(SystemExit) as end:
        trainer.train()
    last = max(trainer.losses)
    assert end.value.code == 143 and 5 <= last < 20 and folders(tmp_path / "run")[-1] == last
    assert events(tmp_path, "training_ended")[-1]["outcome"] == "preempted"
    np.random.seed(7)
    assert min(run(20, tmp_path / "run", resume=True).losses) == last + 1

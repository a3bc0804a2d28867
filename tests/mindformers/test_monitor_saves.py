"""What our CheckpointMonitor saves, when, and what a failure does, in the files and events that a
user sees."""

# ruff: noqa: F811  fixtures are imported
from types import SimpleNamespace

import pytest

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from monitor_jobs import (
    Job,
    Writer,
    build,
    calls,  # noqa: F401
    committed,
    emergency,
    files,
    own_context,  # noqa: F401
)

import mindresume  # noqa: E402
from mindresume import runtime  # noqa: E402
from mindresume.errors import SaveError  # noqa: E402


@pytest.mark.parametrize("done, expected", [(7, [10, 15, 19]), (13, [15, 20, 25])])
def test_saves_fall_on_absolute_multiples_after_a_resume(tmp_path, done, expected):
    Job(build(tmp_path, done=done), done).steps(12).end()
    assert committed(tmp_path) == expected
    last = expected[-1]
    assert f"net_rank_0-{(last - 1) // 10 + 1}_{(last - 1) % 10 + 1}.safetensors" in files(tmp_path)


def test_by_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runtime, "monotonic", lambda: now[0])
    job = Job(build(tmp_path, save_checkpoint_steps=0, save_checkpoint_seconds=60))
    for seconds, steps in ((61, [1]), (30, [1]), (31, [1, 3]), (59, [1, 3]), (2, [1, 3, 5])):
        now[0] += seconds
        job.steps(1)
        assert committed(tmp_path) == steps


@pytest.mark.parametrize("steps, seconds", [(0, 0), (None, None)])
def test_neither_steps_nor_seconds_saves_the_end_only(tmp_path, steps, seconds):
    Job(build(tmp_path, save_checkpoint_steps=steps, save_checkpoint_seconds=seconds)).steps(
        7
    ).end()
    assert committed(tmp_path) == [7]


def test_a_recorded_name_is_not_reused_after_its_file_is_lost(tmp_path):
    Job(build(tmp_path)).steps(5)
    for path in (tmp_path / "checkpoint" / "rank_0").iterdir():
        path.unlink()
    Job(build(tmp_path)).steps(5)
    assert files(tmp_path) == ["net_rank_0_1-1_5.safetensors"]


def test_a_last_save_that_failed_is_tried_again_at_the_end(tmp_path):
    job = Job(build(tmp_path, async_save="thread")).steps(4)
    way = tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors"
    way.parent.mkdir(parents=True, exist_ok=True)
    way.write_text("in the way")
    job.steps(1)
    for outcome in job.monitor._training.manager._saver.wait(600):
        job.monitor._training.manager._handle([outcome])
    way.unlink()
    job.end()
    assert committed(tmp_path) == [5]


def test_without_loss_scale_in_append_info_none_is_saved(tmp_path):
    Job(build(tmp_path, append_info=[{"epoch_num": 0, "step_num": 0}])).steps(5)
    candidate = mindresume.open(tmp_path / "checkpoint").latest()
    assert candidate.state.loss_scale is None


def test_a_failed_training_finishes_its_saves_and_a_finished_one_has_none(tmp_path, own_context):
    job = Job(build(tmp_path, async_save="thread", save_network_params=True)).steps(5)
    assert own_context.saves is job.monitor._training
    job.monitor._training.manager.finish_after_error()
    assert committed(tmp_path) == [5]
    assert files(tmp_path, "checkpoint_network") == ["net_rank_0-network-1_5.safetensors"]
    Job(build(tmp_path)).steps(5).end()
    assert own_context.saves is None


def test_a_monitor_in_a_second_training_saves_its_steps(tmp_path):
    """The steps of the first training counted as saved, so the second saved nothing."""
    job = Job(build(tmp_path)).steps(10).end()
    second = Job(job.monitor).steps(10).end()
    assert files(tmp_path)[-2:] == ["net_rank_0_1-1_10.safetensors", "net_rank_0_1-1_5.safetensors"]
    assert second.monitor._training.manager.policy.saved == {5, 10}


def test_an_encrypted_file_is_written_by_the_built_in(tmp_path):
    Job(build(tmp_path, enc_key=b"0123456789abcdef", checkpoint_format="ckpt")).steps(5)
    assert (
        files(tmp_path, fmt="ckpt") == ["net_rank_0-1_5.ckpt"]
        and not (tmp_path / "checkpoint" / ".mindresume").exists()
    )


def test_an_emergency_in_a_saved_step_writes_nothing_again(tmp_path):
    job = Job(build(tmp_path)).steps(5)
    emergency(job)
    assert files(tmp_path) == ["net_rank_0-1_5.safetensors"] and committed(tmp_path) == [5]
    # MindIO repaired it, and the training went on
    job.steps(5).end()
    assert committed(tmp_path) == [5, 10]


def test_an_emergency_outside_any_training_is_left_to_the_built_in(tmp_path, calls):
    job = Job(build(tmp_path)).steps(5).end()
    job.monitor._append_dict["__exception_save__"] = True
    job.monitor._save_ckpt(job.params, True)
    assert "_save_ckpt" in calls


def test_a_monitor_whose_training_never_began_leaves_saving_to_the_built_in(tmp_path):
    job = Job(build(tmp_path / "other"))
    # as the second monitor for MindIO TTP
    monitor = build(tmp_path)
    job.params.cur_step_num, job.params.cur_epoch_num = 3, 1
    monitor._save_ckpt(job.params, True)
    assert files(tmp_path) == ["net_rank_0-1_3.safetensors"] and committed(tmp_path) == []


def test_the_loss_and_reported_metrics_are_recorded(tmp_path):
    def newest():
        return dict(mindresume.open(tmp_path / "checkpoint").latest().state.metrics)

    job = Job(build(tmp_path)).steps(5)
    assert newest() == {"loss": 0.5}
    mindresume.plugin.report_metric("eval_loss", ms.Tensor([2.5]))
    mindresume.plugin.report_metric("bleu", ms.Tensor(30, ms.bfloat16))
    job.steps(5)
    assert newest() == {"loss": 0.5, "eval_loss": 2.5, "bleu": 30.0}
    # the older value would be wrong now
    mindresume.plugin.report_metric("eval_loss", float("nan"))
    # the user knows better than the last batch
    mindresume.plugin.report_metric("loss", 0.75)
    job.steps(5)
    assert newest() == {"loss": 0.75, "bleu": 30.0}


def test_a_health_that_cannot_be_recorded_fails_the_save_to_disk_alone(tmp_path, monkeypatch):
    monitor, given = build(tmp_path, use_checkpoint_health_monitor=True), []
    monkeypatch.setattr(monitor, "get_checkpoint_health_info", lambda params: 0)

    def fail(health, name):
        raise SaveError("no space")

    monkeypatch.setattr(monitor, "_record_health", fail)
    job = Job(monitor)
    tier = SimpleNamespace(step_end=lambda state, collected: given.append(collected))
    monkeypatch.setattr(monitor._training.manager, "_tier", tier)
    job.steps(5)
    assert given[-1].step == 5 and committed(tmp_path) == []


def test_saves_write_scalars_if_tensorboard_is_enabled(tmp_path, monkeypatch):
    writer = Writer()
    monkeypatch.setattr("mindformers.utils.tensorboard._GLOBAL_TENSORBOARD_WRITER", writer)
    Job(build(tmp_path, async_save="thread")).steps(10).end()
    # no steps-lost: no job failed
    assert {tag: list(rows) for tag, rows in writer.rows.items()} == {
        f"mindresume/{tag}": [5, 10] for tag in ("save-seconds", "save-stall-seconds", "save-MiB")
    }
    assert min(min(rows.values()) for rows in writer.rows.values()) >= 0
    path = tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors"
    assert writer.rows["mindresume/save-MiB"][5] * 2**20 == path.stat().st_size

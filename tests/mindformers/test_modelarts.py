"""When checkpoints go to an object store, and into which folder they come back. Real mindformers, a
fake moxing."""

import pytest
from fakes import moxing
from rank_folders import dir_at

pytest.importorskip("mindformers.tools")

from mindformers.tools.register import MindFormerConfig  # noqa: E402
from mindformers.tools.utils import check_in_modelarts  # noqa: E402

from mindresume.coordination.collectives import SingleProcess  # noqa: E402
from mindresume.errors import ConfigError, RemoteError  # noqa: E402
from mindresume.events import WARNING, warning  # noqa: E402
from mindresume.mindformers import adapter, configuration  # noqa: E402
from mindresume.resume import selection  # noqa: E402
from mindresume.resume.eligible import SelectionPolicy  # noqa: E402
from mindresume.saving import remote_checkpoints  # noqa: E402
from mindresume.saving.remote_checkpoints import RemoteCheckpoints  # noqa: E402
from mindresume.storage.object_store import FsspecStore  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    for name in configuration.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "moxing", moxing)


@pytest.mark.parametrize("name", configuration.VARIABLES)
def test_modelarts_is_detected_as_by_mindformers(monkeypatch, name):
    assert not configuration.modelarts_variable() and not check_in_modelarts()
    monkeypatch.setenv(name, "x")
    assert configuration.modelarts_variable() == name and check_in_modelarts()


def test_the_url_is_ignored_outside_modelarts_with_one_warning():
    events = []
    assert (
        configuration.remote_of(MindFormerConfig(remote_save_url="obs://bucket/job"), events.append)
        is None
    )
    assert [event.level for event in events] == [WARNING] and "obs://bucket/job" in events[0].text


@pytest.mark.parametrize("url", ["s3://bucket/job/", "memory://job"])
def test_any_fsspec_store_is_used_outside_modelarts(url):
    pytest.importorskip("s3fs")
    events = []
    remote = configuration.remote_of(MindFormerConfig(remote_save_url=url), events.append)
    assert (
        isinstance(remote.store.driver, FsspecStore)
        and remote.url == url.rstrip("/") + "/checkpoint"
        and events == []
    )


@pytest.mark.parametrize("url", ["obs://bucket/job", "s3://bucket/job/", None, ""])
def test_below_the_url(monkeypatch, url):
    monkeypatch.setenv("MA_JOB_DIR", "x")
    remote = configuration.remote_of(MindFormerConfig(remote_save_url=url), pytest.fail)
    assert (remote and remote.url) == (url.rstrip("/") + "/checkpoint" if url else None)


@pytest.mark.parametrize("url", ["/cache/job", 5])
def test_an_invalid_url_is_an_error_that_names_the_expected_form(monkeypatch, url):
    with pytest.raises(ConfigError, match=f"{url}.*expected .*s3://"):
        configuration.remote_of(MindFormerConfig(remote_save_url=url))
    monkeypatch.setenv("MA_JOB_DIR", "x")
    said = f"remote_save_url is {url!r}; expected .* obs:// or s3://"
    with pytest.raises(ConfigError, match=said):
        configuration.remote_of(MindFormerConfig(remote_save_url=url))


def test_modelarts_without_moxing(monkeypatch):
    monkeypatch.setattr(configuration, "find_spec", lambda name: None)
    configuration.require_moxing()
    monkeypatch.setenv("BATCH_GROUP_NAME", "x")
    with pytest.raises(ConfigError, match="BATCH_GROUP_NAME is set.*moxing"):
        configuration.require_moxing()


@pytest.mark.parametrize("section", [False, True])
@pytest.mark.parametrize(
    "directory, path, looked_at",
    [
        (None, "output/checkpoint", True),
        (None, "output/checkpoint/", True),
        (None, "output/checkpoint/rank_0", True),
        (None, "output", True),
        (None, "pretrained", False),
        ("other", "other/checkpoint", True),
        ("other", "other", True),
        ("other", "output/checkpoint", False),
    ],
)
def test_downloads_go_only_to_the_folder_in_which_the_job_saves(
    monkeypatch, tmp_path, directory, path, looked_at, section
):
    """``section``: the directory is save_path of the section checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapter, "output_root", lambda: str(tmp_path / "output"))
    asked, events = [], []
    monkeypatch.setattr(
        selection.BucketSource, "fetch_newer", lambda self, *rest: asked.append(self.root)
    )
    monkeypatch.setattr(selection.BucketSource, "allow", lambda self, choice: choice)
    monitor = {"type": "CheckpointMonitor", **({} if section else {"directory": directory})}
    config = MindFormerConfig(
        callbacks=[{"type": "MFLossMonitor"}, monitor],
        checkpoint={"save_path": directory} if section and directory else {},
    )
    sources = selection.CheckpointSources(
        saved_to=configuration.checkpoint_roots(config), remote=RemoteCheckpoints(None, "obs://b/c")
    )
    choice = selection.select_checkpoint(
        PosixStorage(), path, SingleProcess(), SelectionPolicy(1), sources, events.append
    )
    assert choice.is_fresh_start and bool(asked) is looked_at
    assert looked_at == (events == []) and all(
        "obs://b/c" in event.text and path in event.text for event in events
    )


def test_a_store_that_cannot_list_run_numbers_is_a_warning(tmp_path):
    class Refuses:
        def list(self, prefix):
            raise RemoteError("403")

    events = []
    remote_checkpoints.number_runs(
        dir_at(tmp_path), RemoteCheckpoints(Refuses(), "obs://b/c"), "", events.append
    )
    remote_checkpoints.number_runs(dir_at(tmp_path), None, "", events.append)
    assert events == [warning("403")]

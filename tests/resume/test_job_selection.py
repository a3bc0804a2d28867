"""The selection at the start of a job, without mindformers: its events, read lock and load
attempt."""

import shutil

import pytest
from job_choices import ALONE
from rank_folders import (
    RUN,
    STORAGE,
    Ranks,
    dir_at,
    flip_bit,
    path_of,
    save,
    write_foreign,
)

from mindresume.coordination.lease import lease_holders
from mindresume.coordination.storage_topology import Visibility
from mindresume.errors import CollectiveError, LoadError, MissingCheckpointError
from mindresume.events import (
    WARNING,
    CandidateRefused,
    CheckpointSelected,
    FreshStart,
    VerifiedBytesKept,
    VisibilityWaited,
    ignore,
)
from mindresume.model.manifest import FOLDER
from mindresume.reshard.open_checkpoint import ConsolidatedSource
from mindresume.resume import job_selection
from mindresume.resume.bucket_source import BucketSource
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.job_selection import (
    CheckpointSelector,
    SelectionRequest,
    caching_storage,
    locate_checkpoints,
    own_shard,
)
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.settings import Settings
from mindresume.storage.read_cache import ReadCache


@pytest.fixture
def events():
    """Collects emitted events; those of several ranks in any order."""
    return []


def chooser(group=ALONE, storage=STORAGE, settings=None, emit=ignore, **options):
    consolidated = ConsolidatedSource(group, True, True)
    sources = CheckpointSources(consolidated=consolidated, **options)
    return CheckpointSelector(storage, group, settings or Settings(), emit, sources)


def choose(path, group=ALONE, storage=STORAGE, settings=None, emit=ignore, **request):
    """Returns what a job selects, without its read lock."""
    found = chooser(group, storage, settings, emit).select(SelectionRequest(str(path), **request))
    if found.read_lock is not None:
        found.read_lock.release()
    return found


def locked(root):
    return [holder.holds for holder in lease_holders(dir_at(root)) if holder.holds]


@pytest.fixture
def damaged(tmp_path):
    """Saves step 5, and step 10, which is damaged."""
    for step in (5, 10):
        save(tmp_path, step, world=1)
    flip_bit(path_of(tmp_path, 10, 0))
    return tmp_path


def test_the_newest_good_checkpoint_is_locked_until_it_is_read_and_its_load_attempt_counted(
    damaged, events
):
    output = str(damaged / "output")
    found = chooser(emit=events.append).select(SelectionRequest(str(damaged), output_dir=output))
    assert (found.choice.chosen.step, found.uses_layouts) == (5, False)
    assert own_shard(found.choice, ALONE).rank == 0 and own_shard(None, ALONE) is None
    assert locked(damaged) == [(found.choice.chosen.name,)]
    assert (found.load_attempt.output, found.load_attempt.begun) == (output, False)
    refused, selected = events
    assert (type(refused), refused.step, refused.file, refused.weights_only) == (
        CandidateRefused,
        10,
        "rank_0/net_rank_0-1_10.safetensors",
        False,
    )
    assert selected == CheckpointSelected(5, 1, RUN, str(damaged), selected.description)
    found.read_lock.release()
    assert locked(damaged) == []


@pytest.mark.parametrize(
    "request_, settings",
    [
        ({}, Settings()),
        ({"output_dir": "/x", "resume": False}, Settings()),
        ({"output_dir": "/x"}, Settings(max_failed_loads=0)),
    ],
)
def test_a_job_that_does_not_report_its_first_step_counts_no_load_attempt(
    tmp_path, request_, settings
):
    save(tmp_path, 5, world=1)
    found = choose(tmp_path, settings=settings, **request_)
    assert found.load_attempt is None and found.choice.chosen.step == 5


def test_events_of_a_weights_only_load_are_marked(damaged, events):
    choose(damaged, resume=False, emit=events.append)
    assert [type(event) for event in events] == [CandidateRefused, CheckpointSelected]
    assert all(event.weights_only for event in events)


@pytest.mark.parametrize("there", [True, False])
def test_a_fresh_start_has_a_reason_and_is_an_error_for_weights_only(tmp_path, events, there):
    path = tmp_path / "checkpoint"
    if there:
        path.mkdir()
    found = choose(path, pretrained="gpt", emit=events.append)
    assert found.choice is None and found.read_lock is None and found.load_attempt is None
    (event,) = events
    assert event == FreshStart(str(path), event.reason, "of gpt", is_expected=there)
    with pytest.raises(MissingCheckpointError, match=str(path)):
        choose(path, resume=False)


def test_a_file_is_named_already(damaged, events):
    name = "net_rank_0-1_10.safetensors"
    found = choose(path_of(damaged, 5, 0), requested=name, emit=events.append)
    assert found.choice.chosen.step == 5
    assert events[0].level == WARNING and name in events[0].text


def test_unhealthy_checkpoints_are_refused_and_problems_are_reported(tmp_path, events):
    root, health = tmp_path / "checkpoint", tmp_path / "health_ckpts.json"
    for step in (5, 10):
        save(root, step, world=1)
    health.write_text('[{"is_health": 1, "ckpt_name": "net_rank_0-1_10.safetensors"}]')
    assert choose(root, health_dir=str(tmp_path)).choice.chosen.step == 5
    health.write_text("[")
    choose(root, health_dir=str(tmp_path), emit=events.append)
    assert events[0].level == WARNING and str(health) in events[0].text


@pytest.mark.parametrize("when", ["lock", "later"])
def test_a_job_that_cannot_begin_releases_its_read_lock(tmp_path, monkeypatch, when):
    """The lock of a rank remained if another rank found the checkpoint removed."""
    save(tmp_path, 5, world=2)
    if when == "lock":
        monkeypatch.setattr(
            job_selection, "gather_results", lambda _, work, **more: [work(), False]
        )
        error = LoadError
    else:
        monkeypatch.setattr(job_selection, "describe_candidate", lambda *_: 1 / 0)
        error = ZeroDivisionError
    with pytest.raises(error):
        chooser()._protect(SelectionRequest("x"), taken(tmp_path), False)
    assert locked(tmp_path) == []


def taken(root):
    return select_checkpoint(STORAGE, str(root), ALONE, SelectionPolicy(2, full=False))


def test_a_checkpoint_removed_during_selection_is_an_error_on_all_ranks(tmp_path):
    save(tmp_path, 5, world=2)
    choice = taken(tmp_path)
    shutil.rmtree(tmp_path / FOLDER / choice.chosen.name)
    for error in Ranks(2).run(
        lambda group: chooser(group)._protect(SelectionRequest("x"), choice, False)
    ):
        assert isinstance(error, LoadError) and choice.chosen.records_dir in str(error)


@pytest.mark.parametrize("world, converts", [(2, False), (1, True)])
def test_a_mindformers_checkpoint_of_as_many_ranks_is_loaded_directly(tmp_path, world, converts):
    write_foreign(tmp_path, 5, world=world)
    found = Ranks(2).run(
        lambda group: choose(tmp_path, group, any_layout=True, resume=False, keep_layout=True)
    )
    assert [one.uses_layouts for one in found] == [converts] * 2


def test_only_a_resume_asks_the_object_store(tmp_path, monkeypatch):
    save(tmp_path, 5, world=1)
    asked = []

    monkeypatch.setattr(BucketSource, "fetch_newer", lambda self, *rest: asked.append(self.root))
    selector = chooser(remote=object(), saved_to={str(tmp_path)})
    for resume in (True, False):
        selector.select(SelectionRequest(str(tmp_path), resume=resume)).read_lock.release()
    assert asked == [str(tmp_path)]


def test_verified_bytes_are_cached_for_the_load_up_to_half_of_the_memory_share(
    tmp_path, monkeypatch, events
):
    monkeypatch.setattr(job_selection, "share_of_rank", lambda group: 1 << 20)
    assert caching_storage(STORAGE, Settings(verify="quick"), ALONE) is STORAGE
    assert caching_storage(STORAGE, Settings(staging_gib=2**-20), ALONE).budget == 1 << 10
    storage = caching_storage(STORAGE, Settings(), ALONE)
    assert isinstance(storage, ReadCache) and storage.budget == 1 << 19
    save(tmp_path, 5, world=1)
    choose(tmp_path, storage=storage, emit=events.append)
    size = path_of(tmp_path, 5, 0).stat().st_size
    assert (storage.size, storage.budget) == (size, 0)
    assert events[-1] == VerifiedBytesKept(size, 0, 1 << 19)
    storage.clear()
    small = caching_storage(STORAGE, Settings(staging_gib=2**-28), ALONE)
    choose(tmp_path, storage=small, emit=events.append)
    assert events[-1] == VerifiedBytesKept(0, size, 4)


@pytest.mark.parametrize(
    "settled", [Visibility(12), Visibility(65, ("rank 1 sees x",)), Visibility()]
)
def test_waiting_for_a_late_listing_emits_an_event(tmp_path, monkeypatch, events, settled):
    save(tmp_path, 5, world=1)
    monkeypatch.setattr(job_selection, "wait_until_visible", lambda *_: settled)
    choose(tmp_path, emit=events.append)
    waited = [event for event in events if isinstance(event, VisibilityWaited)]
    assert waited == (
        [VisibilityWaited(settled.wait_seconds, settled.missing)] if settled != Visibility() else []
    )


# ---- the source of the checkpoint ----------------------------------------------------------------


def test_all_ranks_look_in_one_place(tmp_path):
    """Nodes that share no disk: the disk of rank 0 is new."""

    class Node:
        def __getattr__(self, name):
            return getattr(STORAGE, name)

        def __init__(self, here):
            self.status = STORAGE.status if here else lambda path: None

    save(tmp_path / "checkpoint", 5, world=2)

    def look(*there):
        return Ranks(2).run(
            lambda group: locate_checkpoints(Node(there[group.rank]), str(tmp_path), group, ignore)
        )

    assert (
        look(True, True)
        == look(True, False)
        == look(False, True)
        == [str(tmp_path / "checkpoint")] * 2
    )
    assert look(False, False) == [str(tmp_path)] * 2
    save(tmp_path / "other", 5, world=2)
    shutil.rmtree(tmp_path / "checkpoint")
    save(tmp_path / "another", 5, world=2)
    assert ["several folders" in str(error) for error in look(False, True)] == [True, True]


def test_an_unknown_topology_is_not_cached(tmp_path, monkeypatch):
    """Reading treats the folder as shared. Saving determines the topology again, or it would wait
    for records that other nodes keep."""

    def fail(*_):
        raise CollectiveError("rank 1: OSError: no space left")

    monkeypatch.setattr(job_selection, "find_shared_groups", fail)
    known = {}
    assert (
        not job_selection.shared_groups_of(STORAGE, str(tmp_path), ALONE, known, ignore).is_split
        and known == {}
    )

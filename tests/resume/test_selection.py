"""The one function by which job and command line select a checkpoint, and its preview by a single
process."""

import pytest
from coordination.test_storage_topology import save_part
from job_choices import ALONE
from rank_folders import STORAGE, Ranks, flip_bit, path_of, save

from mindresume.errors import CollectiveError, MissingCheckpointError
from mindresume.formats import MERGED, Candidate
from mindresume.model.manifest import FileRecord
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import preview_selection, select_checkpoint
from mindresume.resume.sources import CheckpointSources

WHOLE = Candidate(
    7, MERGED, "safetensors", {0: (FileRecord("part0.safetensors", "safetensors"),)}, 1
)


def preview(path, *policy, sources=None, **options):
    return preview_selection(
        STORAGE, str(path), SelectionPolicy(*policy, every_rank=True, **options), sources
    )


def select(path, policy, sources=None, group=ALONE):
    return select_checkpoint(STORAGE, str(path), group, policy, sources)


class Consolidated:
    def choose(self, storage, path):
        return Choice(WHOLE, root=path)


class Damaged:
    def choose(self, storage, path):
        raise CollectiveError("rank 0: part0.safetensors is damaged")


@pytest.fixture
def weights(tmp_path):
    """Returns a file whose location makes it count as consolidated weights."""
    folder = tmp_path / "unified"
    folder.mkdir()
    (folder / "part0.safetensors").write_bytes(b"")
    return folder


# ---- consolidated weights ------------------------------------------------------------------------


def test_a_single_file_counts_as_consolidated_weights_only_where_any_layout_is_loaded(weights):
    sources = CheckpointSources(consolidated=Consolidated())
    path = weights / "part0.safetensors"
    assert select(path, SelectionPolicy(any_layout=True), sources).chosen is WHOLE
    with pytest.raises(MissingCheckpointError):
        select(path, SelectionPolicy(1), sources)


def test_damage_of_consolidated_weights_ends_the_job_and_is_the_error_of_a_preview(weights):
    sources = CheckpointSources(consolidated=Damaged())
    with pytest.raises(CollectiveError):
        select(weights, SelectionPolicy(1), sources)
    found = preview(weights, sources=sources)
    assert found.error == "part0.safetensors is damaged"
    assert found.choice.chosen is None and not found.choice.is_fresh_start


@pytest.mark.parametrize("requested", [None, "x.safetensors"])
def test_job_and_preview_select_consolidated_weights_whatever_name_is_requested(weights, requested):
    """The command line refused what the job takes."""
    sources = CheckpointSources(consolidated=Consolidated())
    choice = select(weights, SelectionPolicy(1, requested), sources)
    found = preview(weights, requested=requested, sources=sources)
    assert choice.chosen is found.choice.chosen is WHOLE and choice.consolidated
    assert (found.error, found.node_local) == ("", None)


# ---- folders of checkpoints ----------------------------------------------------------------------


def test_job_and_preview_select_the_same(tmp_path):
    for step in (5, 10):
        save(tmp_path / "checkpoint", step, world=2)
    flip_bit(path_of(tmp_path / "checkpoint", 10, 1))
    job = Ranks(2).run(
        lambda group: select(tmp_path / "checkpoint", SelectionPolicy(2), group=group)
    )
    found = preview(tmp_path).choice
    for choice in (*job, found):
        assert choice.chosen.step == 5 and choice.refused == found.refused
    assert [refusal.step for refusal in found.refused] == [10]
    assert not found.consolidated and found.root == str(tmp_path / "checkpoint")
    (note,) = found.notes  # says where the checkpoints lie
    assert str(tmp_path / "checkpoint") in note
    assert preview(tmp_path, full=False).choice.chosen.step == 10


# ---- node-local storage --------------------------------------------------------------------------


def test_a_preview_names_the_newest_step_with_complete_files_on_this_node(tmp_path):
    for step in (5, 10):
        save_part(tmp_path, step, (0, 1))
    flip_bit(path_of(tmp_path, 10, 1))
    found = preview(tmp_path)
    candidate = found.node_local.candidate
    assert found.choice.chosen is None and found.error
    assert (candidate.step, candidate.local_ranks) == (5, (0, 1))
    assert preview(tmp_path, full=False).node_local.candidate.step == 10
    assert preview(tmp_path, requested="net_rank_0-1_10.safetensors").node_local is None

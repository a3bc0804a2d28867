"""A save in memory is copied to disk on all ranks together."""

import shutil

import iteration_folders
import pytest
from coordination.test_storage_topology import save_part
from rank_folders import STORAGE, Ranks, dir_at, flip_bit, path_of, save
from saving.memory_tier.test_tier import Training

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import SharedGroups, single_group
from mindresume.errors import CollectiveError
from mindresume.formats.records import scan_records
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.memory_source import DiskCopy, write_selected
from mindresume.resume.selection import select_checkpoint


def selected(root, tier):
    return Choice(
        scan_records(dir_at(tier))[0][0], (), (), False, (), str(tier), directory=str(root)
    )


def chosen(root):
    choice = select_checkpoint(
        STORAGE, str(root), SingleProcess(), SelectionPolicy(every_rank=True)
    )
    return choice.chosen.step, choice.chosen.committed


@pytest.mark.parametrize("iterations", [False, True])
def test_all_ranks_write_the_selected_save(root, tier, iterations):
    Training(tier, 2, world=2, iterations=iterations).steps(5).stop()
    Ranks(2).run(
        lambda group: write_selected(STORAGE, selected(root, tier), group, single_group(2))
    )
    assert chosen(root) == (4, True)


def test_a_step_that_is_committed_but_not_published_is_published(root, tier):
    """The job died before the rename, and memory has the step, too: mindformers alone would take
    the step before."""
    Training(tier, 2, world=2, iterations=True).steps(5).stop()
    choice = selected(root, tier)
    for _ in range(2):
        Ranks(2).run(lambda group: write_selected(STORAGE, choice, group, single_group(2)))
        assert iteration_folders.tracker(root) == "4"
        iteration_folders.unname(root, 4, choice.chosen.run)
        iteration_folders.intend(root, 4)
    Ranks(2).run(lambda group: write_selected(STORAGE, choice, group, single_group(2)))
    assert iteration_folders.folder_of(root, 4).is_dir()


def test_several_nodes_write_their_parts(root, tmp_path):
    save_part(tmp_path / "a", 10, (0, 1), commit=False)
    save_part(tmp_path / "b", 10, (2, 3), commit=False)
    Ranks(4).run(
        lambda group: write_selected(
            STORAGE,
            selected(root, tmp_path / ("a" if group.rank < 2 else "b")),
            group,
            SharedGroups((0, 0, 2, 2)),
        )
    )
    assert chosen(root) == (10, True)
    shutil.rmtree(root)
    part = scan_records(dir_at(tmp_path / "a"))[0][0]
    copy = DiskCopy(dir_at(root), str(tmp_path / "a"), part)
    copy.write()
    assert not copy.commit()  # the other part is missing


def test_a_committed_checkpoint_is_left_as_it_is(root, tier):
    save(root, 10, world=2)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    save(tier, 10, world=2)
    DiskCopy(dir_at(root), str(tier), selected(root, tier).chosen).write()
    assert {path: path.read_bytes() for path in before} == before and chosen(root) == (10, True)


def test_bytes_that_changed_meanwhile_are_not_kept(root, tier):
    save(tier, 10, world=2)
    choice = selected(root, tier)
    flip_bit(path_of(tier, 10, 1))
    errors = Ranks(2).run(lambda group: write_selected(STORAGE, choice, group, single_group(2)))
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert not path_of(root, 10, 1).exists() and not any(
        c.committed for c in scan_records(dir_at(root))[0]
    )

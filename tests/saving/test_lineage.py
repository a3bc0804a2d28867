"""Which checkpoints belong to one training: retention counts and removes these, also in folders of
earlier versions and of several trainings."""

import io

import iteration_folders
import pytest
from iteration_folders import folder_of, listing, track, tracker
from rank_folders import RUN, STORAGE, dir_at, save
from saving.test_shard_writer import shard_of

from mindresume.errors import RecordError
from mindresume.events import Event, Notice
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    attempt_name,
    encode_head,
    read_head,
    read_record,
    run_name,
)
from mindresume.saving.committer import Committer
from mindresume.saving.retention import (
    KeepLast,
    continued,
    newest_lineage,
    others,
)
from mindresume.saving.shard_writer import SaveTarget, write_shard

RUNS = [
    RUN,
    *(
        run_name(number, f"0000{letter * 4}")
        for number, letter in ((2, "b"), (3, "c"), (4, "d"), (5, "e"))
    ),
]


class Trainings:
    """Runs in one folder, one after the other. ``fmt``: "1.0" or "2.0"."""

    def __init__(self, root, fmt):
        self.root, self.fmt, self.number = root, fmt, 0

    def run(self, *steps, origin=None, keep=2, recorded=True):
        """``origin``: the step it resumes from, of the newest run that has it, None: a fresh start.
        ``recorded`` False: saved by an earlier version, without lineages."""
        run, self.number = RUNS[self.number], self.number + 1
        chosen = next((c for c in self.found() if c.step == origin), None) if origin else None
        lineage = continued(chosen, run, True) if recorded else ""
        events: list[Event] = []
        for step in steps:
            for rank in range(2):
                target = self.target(run, rank, lineage)
                write_shard(target, shard_of(target, step, suffix=self.number))
            Committer(self.target(run, 0, lineage), KeepLast(keep), events.append).poll(step)
        return events

    def target(self, run, rank, lineage):
        return SaveTarget(STORAGE, str(self.root), run, rank, 2, self.fmt == "2.0", lineage=lineage)

    def found(self):
        return scan_records(dir_at(self.root))[0]

    def committed(self):
        return sorted((c.step, int(c.run[:4])) for c in self.found() if c.committed)


@pytest.fixture(params=["1.0", "2.0"])
def trainings(request, tmp_path):
    return Trainings(tmp_path, request.param)


@pytest.mark.parametrize("recorded", [True, False], ids=["", "of an earlier version"])
def test_a_fresh_start_keeps_the_checkpoints_of_the_previous_training(trainings, recorded):
    trainings.run(100, 110, recorded=recorded)
    trainings.run(10, 20, 30)
    assert trainings.committed() == [(20, 2), (30, 2), (100, 1), (110, 1)]
    trainings.run(40, origin=30)
    assert trainings.committed() == [(30, 2), (40, 3), (100, 1), (110, 1)]
    assert [c.step for c in others(trainings.found(), RUNS[1])] == [110, 100]
    assert newest_lineage(trainings.found()) == RUNS[1]


def test_a_folder_of_an_earlier_version_is_one_training(trainings):
    trainings.run(10, 20, recorded=False)
    trainings.run(30, recorded=False, keep=9)
    trainings.run(40, origin=30)
    assert trainings.committed() == [(30, 2), (40, 3)]
    assert {c.lineage for c in trainings.found()} == {""}


def test_the_run_decides_the_lineage_of_another_folder():
    class Chosen:
        run, lineage = RUNS[1], ""

    assert (
        continued(Chosen, RUNS[2], same_folder=True) == ""
        and continued(Chosen, RUNS[2], same_folder=False) == RUNS[1]
    )
    Chosen.lineage = RUN
    assert (
        continued(Chosen, RUNS[2], same_folder=True)
        == continued(Chosen, RUNS[2], same_folder=False)
        == RUN
    )
    Chosen.run = None  # mindformers wrote it
    assert continued(Chosen, RUNS[2], True) == continued(None, RUNS[2], True) == RUNS[2]


# ---- iteration folders of the same step ----------------------------------------------------------


def test_a_folder_of_another_training_keeps_its_content_under_another_name(tmp_path):
    trainings = Trainings(tmp_path, "2.0")
    trainings.run(10, 20)
    before = (folder_of(tmp_path, 10) / "common.json").read_bytes()
    events = trainings.run(10, keep=1)
    (kept,) = [name for name in listing(tmp_path) if ".kept-" in name]
    assert (tmp_path / kept / "common.json").read_bytes() == before and tracker(tmp_path) == "10"
    assert [kept in event.text for event in events if isinstance(event, Notice)] == [True]
    assert [(c.step, c.run) for c in scan(dir_at(tmp_path)).candidates] == [
        (10, RUNS[1]),
        (20, RUN),
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_a_complete_folder_of_mindformers_is_never_removed(tmp_path, whole):
    """mindformers saved steps 10 and 15; a user set its tracker back, and step 15 is saved
    again."""
    iteration_folders.foreign(tmp_path)
    track(tmp_path, 10)
    if not whole:
        (folder_of(tmp_path, 15) / "common.json").unlink()
    Trainings(tmp_path, "2.0").run(15, keep=1)
    kept = [name for name in listing(tmp_path) if ".kept-" in name]
    assert len(kept) == whole and listing(tmp_path)[:2] == [
        "iteration_00000010",
        "iteration_00000015",
    ]


def test_a_file_in_the_way_is_kept(tmp_path):
    folder_of(tmp_path, 10).write_text("notes of a user")
    Trainings(tmp_path, "2.0").run(10, keep=1)
    (kept,) = [name for name in listing(tmp_path) if ".kept-" in name]
    assert (tmp_path / kept).read_text() == "notes of a user" and tracker(tmp_path) == "10"


# ---- on disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", 5, "../0001-0000aaaa"])
def test_a_lineage_is_the_name_of_a_run(tmp_path, value):
    save(tmp_path, 5, world=1)
    for name, kind, read in (
        (MANIFEST, "manifest", Manifest.read),
        ("rank_00000.json", "record", read_record),
    ):
        with open(tmp_path / FOLDER / attempt_name(5, RUN) / name, "rb") as file:
            head, _ = read_head(file, kind, 1 << 20)
        with pytest.raises(RecordError):
            read(io.BytesIO(encode_head({**head, "lineage": value})))

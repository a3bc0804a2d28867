"""Mutation test of the drill: it finds each known error of saving, put back into the product one at
a time.

A mutant breaks one rule of ``docs/format.md``. It counts as found only if the product passes when
the same operation is struck.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from mindresume import storage as storage_room
from mindresume.coordination import lease, lease_acquisition
from mindresume.coordination.lease import ReadLocks
from mindresume.errors import LeaseHeldError, SaveError
from mindresume.fault_injection import runner, scenarios
from mindresume.fault_injection.faults import Fault, RankStorage
from mindresume.fault_injection.journal import ITERATION
from mindresume.fault_injection.runner import Cell, Setup, Task, cell, prepare
from mindresume.fault_injection.scenarios import (
    HARD_FAIL,
    LOST_WORK,
    SILENT_DIVERGENCE,
    Sandbox,
    Scenario,
)
from mindresume.formats import CheckpointDir, rank_folders
from mindresume.formats import scan as scanning
from mindresume.formats.iterations import COMMON, METADATA, TRACKER, iteration_name
from mindresume.formats.rank_folders import META, folder_name, meta_json, parse_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, FORMATS, MANIFEST, Manifest, read_record, record_rank
from mindresume.resume import candidates, sources, verifier
from mindresume.resume.replicas import ShardSource
from mindresume.resume.verifier import VerifiedShard
from mindresume.saving import (
    committer,
    garbage_collector,
    iteration_publisher,
    retention,
    shard_writer,
)
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import Committer, SyncSaver
from mindresume.saving.shard_writer import Outcome
from mindresume.storage import temporary_name
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header

CONTROL, LEFT = "CONTROL", "LEFT"  # found without any fault; found by leftover files
FAR = 10**6  # number of an operation that never comes
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """``verdict``: the expected verdict of the drill in ``scenario`` under ``fault``. ``where``:
    limits the test to operations with this text in their name or path, to be fast. ``seed``: an
    order of the ranks in which it matters."""

    mutate: Callable[[Patch], None]
    format: str
    scenario: str
    fault: str
    verdict: str
    where: str = ""
    seed: int = 0

    @property
    def name(self) -> str:
        return self.mutate.__name__.replace("_", " ")


MUTANTS: list[Mutant] = []


def found(*case: str, format: str = "", **more: int) -> Callable[..., Callable[[Patch], None]]:
    """Says how a mutant is found: see ``Mutant``. ``format``: by default one of the rank
    folders."""

    def add(mutate: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(mutate, format or FORMATS[len(MUTANTS) % 2], *case, **more))
        return mutate

    return add


def patch_all(patch: Patch, name: str, value: object) -> None:
    """Patches ``name`` in every module that has imported it."""
    for module in (
        storage_room,
        shard_writer,
        committer,
        iteration_publisher,
        lease,
        lease_acquisition,
        garbage_collector,
        scenarios,
        rank_folders,
        verifier,
        scanning,
        candidates,
        sources,
    ):
        if hasattr(module, name):
            patch.setattr(module, name, value)


class NoSync:
    """Flushes no folder."""

    def __init__(self, disk):
        self.disk = disk

    def __getattr__(self, name):
        return (lambda folder: None) if name == "sync" else getattr(self.disk, name)


# ---- publishing ----------------------------------------------------------------------------------


@found("save", "power", LOST_WORK)
@found("first save", "power", HARD_FAIL)
@found("pointers", "power", LOST_WORK, "latest", format=ITERATION)
def publish_without_sync(patch: Patch) -> None:
    def publish(disk, path, pieces, tag, size=0):
        temporary = temporary_name(path, tag)
        count = disk.write(temporary, pieces, size)
        disk.rename(temporary, path)
        return count

    patch_all(patch, "publish", publish)


@found("save", "reorder", LOST_WORK, "meta.json")
def weights_published_without_sync(patch: Patch) -> None:
    right = storage_room.publish

    def publish(disk, path, pieces, tag, size=0):
        return right(disk if FOLDER in path else NoSync(disk), path, pieces, tag, size)

    patch_all(patch, "publish", publish)


@found("first save", "torn", HARD_FAIL)
@found("first save", "torn", HARD_FAIL, "json", format=ITERATION)
def publish_without_rename(patch: Patch) -> None:
    def publish(disk, path, pieces, tag, size=0):
        count = disk.write(path, pieces, size)
        disk.sync(os.path.dirname(path))
        return count

    patch_all(patch, "publish", publish)


@found("pointers", "torn", HARD_FAIL)
def pointers_written_in_place(patch: Patch) -> None:
    right = storage_room.publish

    def publish(disk, path, pieces, tag, size=0):
        return (
            disk.write(path, pieces, size)
            if path.endswith(META)
            else right(disk, path, pieces, tag, size)
        )

    patch_all(patch, "publish", publish)


@found("first save", "kill all", HARD_FAIL, "rank_0")
def record_before_weights(patch: Patch) -> None:
    right, waiting = storage_room.publish, threading.local()

    def publish(disk, path, pieces, tag, size=0):
        if os.path.basename(path).startswith("drill_rank"):
            content = b"".join(map(bytes, pieces))
            waiting.file = (path, content)
            return len(content)
        count = right(disk, path, pieces, tag, size)
        if record_rank(os.path.basename(path)) is not None:
            right(disk, waiting.file[0], [waiting.file[1]], tag)
        return count

    patch_all(patch, "publish", publish)


@found("first save", "EIO", HARD_FAIL)
@found("save", "ENOSPC", LOST_WORK)
def errors_of_writing_swallowed(patch: Patch) -> None:
    right = storage_room.publish

    def publish(disk, path, pieces, tag, size=0):
        pieces = list(pieces)
        with suppress(OSError):
            right(disk, path, pieces, tag, size)
        return sum(map(len, pieces))

    patch_all(patch, "publish", publish)


@found("save", "EIO", LOST_WORK, "write")
def failed_saves_reported_as_saved(patch: Patch) -> None:
    right = SyncSaver.write
    patch.setattr(SyncSaver, "write", lambda self, save: replace(right(self, save), saved=True))


@found("background", "kill all", LOST_WORK)
def save_reported_before_it_is_written(patch: Patch) -> None:
    """Reports the save as complete when the writer accepts it."""
    right = AsyncSaver.save

    def save(self, save):
        right(self, save)
        self._outcomes.append(Outcome(save.step, True))
        self._in_flight = None

    patch.setattr(AsyncSaver, "save", save)


@found("first save", "kill all", HARD_FAIL)
def pointer_before_the_file(patch: Patch) -> None:
    right = shard_writer.write_shard

    def write_shard(target, part, **how):
        folder = os.path.join(target.root, folder_name(target.rank))
        target.storage.make_folder(folder)
        name = parse_name(os.path.basename(part.files[0].path))
        storage_room.publish_json(
            target.storage, os.path.join(folder, META), meta_json(name), target.run
        )
        return right(target, part, **how)

    patch_all(patch, "write_shard", write_shard)


# ---- committing ----------------------------------------------------------------------------------


@found("first save", "kill one", HARD_FAIL)
def manifest_without_all_ranks(patch: Patch) -> None:
    """Writes a manifest without waiting for all ranks."""

    def publish_manifest(target, step, tag="", emit=print):
        found, attempt = [], target.attempt(step)
        for name in target.storage.list(attempt):
            if record_rank(name) is not None:
                with target.storage.open(os.path.join(attempt, name)) as file:
                    found.append(read_record(file))
        first = found[0]
        manifest = Manifest(
            first.run,
            len(found),
            first.state,
            0.0,
            tuple(record.files for record in found),
            tuple(record.checksum for record in found),
            (),
            False,
        )
        committer.publish(
            target.storage, os.path.join(attempt, MANIFEST), [manifest.encode()], target.run
        )
        return manifest

    missing = committer.missing_ranks
    patch.setattr(
        committer,
        "missing_ranks",
        lambda *how, **more: [rank for rank in missing(*how, **more) if rank == 0],
    )
    patch.setattr(committer, "publish_manifest", publish_manifest)


@found("first save", "late", CONTROL, seed=3)
def commit_that_gives_up_cleans_up(patch: Patch) -> None:
    """Removes the save when its commit times out."""
    right = Committer.finish

    def finish(self, deadline, pause=0.2):
        left = right(self, deadline, pause)
        for step in left:
            disk, attempt = self.target.storage, self.target.attempt(step)
            for name in disk.list(attempt):
                disk.remove(os.path.join(attempt, name))
        return left

    patch.setattr(Committer, "finish", finish)


@found("first save", "kill all", LEFT, "rename")
def half_written_files_are_not_cleaned(patch: Patch) -> None:
    patch_all(patch, "clean_own_folder", lambda target: [])


# ---- choosing ------------------------------------------------------------------------------------


@found("save", "", CONTROL)
def oldest_first(patch: Patch) -> None:
    right = scanning.scan
    patch.setattr(
        scanning,
        "scan",
        lambda directory: (lambda found: replace(found, candidates=found.candidates[::-1]))(
            right(directory)
        ),
    )


@found("save again", "kill all", LOST_WORK, "rename")
def highest_step_first(patch: Patch) -> None:
    """Selects the highest step, whatever its run."""
    right = scanning.scan
    patch.setattr(
        scanning,
        "scan",
        lambda directory: (
            lambda found: replace(
                found,
                candidates=tuple(
                    sorted(found.candidates, key=lambda c: (c.step, -c.order[0]), reverse=True)
                ),
            )
        )(right(directory)),
    )


@found("first save", "kill all", SILENT_DIVERGENCE, "write")
def missing_ranks_accepted(patch: Patch) -> None:
    """Accepts a save without manifest as soon as one rank recorded it."""
    right = scanning.scan

    def scan(directory):
        found = right(directory)
        return replace(
            found,
            candidates=tuple(
                replace(c, problem=None, world_size=2) if c.files else c for c in found.candidates
            ),
        )

    patch.setattr(scanning, "scan", scan)


@found("pointers", "kill all", LOST_WORK)
@found("save", "kill one", LOST_WORK, "manifest")
@found("pointers", "kill all", LOST_WORK, "list", format=ITERATION)
def only_manifests_count(patch: Patch) -> None:
    """Ignores complete saves without a manifest."""
    right = scanning.scan

    def scan(directory):
        found = right(directory)
        return replace(found, candidates=tuple(c for c in found.candidates if c.committed))

    patch.setattr(scanning, "scan", scan)


def skip_verification(patch: Patch) -> None:
    """Records and files are not verified."""

    def verify_nothing(self, rank):
        return VerifiedShard(
            rank, tuple(map(ShardSource, self.candidate.files[rank])), self.candidate.state
        )

    patch.setattr(verifier.Verifier, "verify", verify_nothing)
    patch.setattr(sources, "check_files", lambda directory, candidate, world, files=True: None)


@found("first save", "torn", SILENT_DIVERGENCE)
def verification_skipped_and_files_written_in_place(patch: Patch) -> None:
    record_before_weights(patch)
    publish = storage_room.publish
    patch_all(
        patch,
        "publish",
        lambda disk, path, pieces, tag, size=0: publish(_InPlace(disk), path, pieces, tag, size),
    )
    skip_verification(patch)


class _InPlace:
    """Writes files under their final names."""

    def __init__(self, disk):
        self.disk = disk

    def __getattr__(self, name):
        return getattr(self.disk, name)

    def write(self, path, pieces, size=0):
        folder, name = os.path.split(path)
        return self.disk.write(
            os.path.join(folder, name[1:].rsplit(".", 2)[0] if "drill_rank" in name else name),
            pieces,
            size,
        )

    def rename(self, old, new):
        if "drill_rank" not in old:
            self.disk.rename(old, new)


# ---- removing ------------------------------------------------------------------------------------


@found("prune", "kill all", HARD_FAIL, "write")
def prune_before_saving(patch: Patch) -> None:
    """Runs retention before the new save, as if that were complete."""
    right = shard_writer.write_shard

    def write_shard(target, part, **how):
        if target.rank == 0 and part.state.step in (20, 30):
            found = [c for c in scan_records(target)[0] if c.committed]
            garbage_collector.carry_out(target, retention.Plan(to_delete=tuple(found)))
        return right(target, part, **how)

    patch_all(patch, "write_shard", write_shard)


@found("prune", "", CONTROL)
def prune_keeps_nothing(patch: Patch) -> None:
    patch.setattr(retention, "protected", lambda *args: {})
    patch.setattr(
        retention,
        "_apply_policy",
        lambda policy, committed, good: ({}, {c.commit_dir: "" for c in committed}),
    )


@found("save", "", CONTROL)
def prune_removes_unfinished_saves(patch: Patch) -> None:
    """Removes saves in progress, too."""
    right = retention.plan

    def plan(*args, **how):
        made = right(*args, **how)
        return replace(made, orphans=made.orphans + made.unfinished, unfinished=())

    patch_all(patch, "plan", plan)


@found("prune", "kill all", HARD_FAIL, "remove")
def removal_without_rename(patch: Patch) -> None:
    def carry_out(directory, made, read_locks=None, emit=print, manifests=None):
        to_delete = [*made.to_delete, *made.orphans]
        for candidate in to_delete:
            garbage_collector._clear(directory, candidate.records_dir, ())
        garbage_collector.empty_trash(directory, read_locks or ReadLocks(directory))
        return to_delete

    patch_all(patch, "carry_out", carry_out)


@found("prune", "kill all", LEFT, "remove")
def records_removed_before_weights(patch: Patch) -> None:
    def _clear(directory, trash, referenced):
        disk = directory.storage
        paths = garbage_collector.weights_of(directory, trash)
        for entry in disk.list(trash):
            disk.remove(os.path.join(trash, entry))
        disk.remove(trash)
        for path in paths:
            disk.remove(path)

    patch.setattr(garbage_collector, "_clear", _clear)


@found("prune", "reorder", LEFT, "trash")
def weights_removed_without_sync(patch: Patch) -> None:
    def _clear(directory, trash, referenced):
        disk = directory.storage
        for path in garbage_collector.weights_of(directory, trash):
            disk.remove(path)
        for entry in disk.list(trash):
            disk.remove(os.path.join(trash, entry))
        disk.remove(trash)

    patch.setattr(garbage_collector, "_clear", _clear)


@found("prune", "kill all", LEFT)
@found("prune", "kill all", LEFT, "remove", format=ITERATION)
def trash_is_never_emptied(patch: Patch) -> None:
    patch.setattr(garbage_collector, "empty_trash", lambda *args, **how: None)


# ---- iteration folders ---------------------------------------------------------------------------


@found("pointers", "kill all", HARD_FAIL, "rename", format=ITERATION)
def tracker_before_the_rename(patch: Patch) -> None:
    right = iteration_publisher.publish_iteration

    def publish_iteration(target, step, newest=True, emit=print):
        iteration_publisher.set_tracker(target, step, target.run)
        right(target, step, newest, emit)

    patch.setattr(iteration_publisher, "publish_iteration", publish_iteration)


@found("pointers", "kill all", HARD_FAIL, "json", format=ITERATION)
def rename_before_the_manifest(patch: Patch) -> None:
    """Gives the folder its final name before it is complete."""

    class There(shard_writer.SaveTarget):
        def data_dir(self, step):
            return os.path.join(self.root, iteration_name(step))

    right = committer.publish_manifest

    def publish_manifest(target, step, tag="", emit=print):
        iteration_publisher.publish_iteration(target, step)
        return right(There(**vars(target)), step, tag, emit)

    patch.setattr(committer, "publish_manifest", publish_manifest)
    patch.setattr(Committer, "_update_pointers", lambda *_: None)


@found("pointers", "kill all", HARD_FAIL, "common", format=ITERATION)
def small_files_after_the_manifest(patch: Patch) -> None:
    right, late = iteration_publisher.publish, threading.local()

    def publish(disk, path, pieces, tag, size=0):
        name = os.path.basename(path)
        if name in (COMMON, METADATA):
            late.files = [*getattr(late, "files", ()), (path, list(pieces))]
            return sum(map(len, late.files[-1][1]))
        return right(disk, path, pieces, tag, size)

    def manifest_first(disk, path, pieces, tag, size=0):
        count = right(disk, path, pieces, tag, size)
        files, late.files = getattr(late, "files", ()), ()
        for small, content in files:
            right(disk, small, content, tag)
        return count

    patch.setattr(iteration_publisher, "publish", publish)
    patch.setattr(committer, "publish", manifest_first)


@found("save again", "kill all", LOST_WORK, "sync", format=ITERATION)
def replaced_folder_removed_first(patch: Patch) -> None:
    """Removes the old folder before the new one is complete, as mindformers does."""
    right = shard_writer.write_shard

    def write_shard(target, part, **how):
        iteration_dir = os.path.join(target.root, iteration_name(part.state.step))
        if target.rank == 0 and target.storage.status(iteration_dir) is not None:
            storage_room.remove_tree(target.storage, iteration_dir)
        return right(target, part, **how)

    patch_all(patch, "write_shard", write_shard)


@found(
    "save again",
    "kill all",
    HARD_FAIL,
    "rename checkpoint/.mindresume/step-0000000020-run-0002-0000bbbb/",
    format=ITERATION,
)
def replaced_folder_written_into(patch: Patch) -> None:
    """Replaces the files of the old folder one at a time."""
    right = iteration_publisher.publish_iteration

    def publish_iteration(target, step, newest=True, emit=print):
        disk, iteration_dir = target.storage, os.path.join(target.root, iteration_name(step))
        if disk.status(iteration_dir) is None:
            return right(target, step, newest, emit)
        for name in disk.list(target.data_dir(step)):
            if name != FOLDER:
                disk.rename(
                    os.path.join(target.data_dir(step), name), os.path.join(iteration_dir, name)
                )
        disk.rename(
            target.attempt(step),
            os.path.join(iteration_dir, FOLDER, os.path.basename(target.attempt(step))),
        )
        storage_room.remove_tree(disk, target.data_dir(step))
        return iteration_publisher.set_tracker(CheckpointDir(disk, target.root), step, target.run)

    patch.setattr(iteration_publisher, "publish_iteration", publish_iteration)


@found(
    "save again",
    "kill all",
    HARD_FAIL,
    "rename checkpoint/.mindresume/step-0000000020",
    format=ITERATION,
)
def tracker_names_the_folder_that_is_being_replaced(patch: Patch) -> None:
    patch.setattr(iteration_publisher, "_set_tracker_back", lambda *args: None)


@found("pointers", "kill all", LOST_WORK, "latest", format=ITERATION)
def intent_not_written(patch: Patch) -> None:
    right = iteration_publisher.publish
    patch.setattr(
        iteration_publisher,
        "publish",
        lambda disk, path, pieces, tag, size=0: (
            0
            if os.path.basename(path).startswith("tracker-")
            else right(disk, path, pieces, tag, size)
        ),
    )


@found("pointers", "kill all", LEFT, "remove", format=ITERATION)
def intents_are_never_finished(patch: Patch) -> None:
    # neither by the next run nor by the next save
    patch.setattr(iteration_publisher, "intents", lambda names: set())


@found("pointers", "reorder", LOST_WORK, "sync checkpoint", seed=8, format=ITERATION)
def renamed_without_sync(patch: Patch) -> None:
    right = iteration_publisher.publish_iteration

    def set_tracker(directory, step, tag):
        disk, root = directory.storage, directory.root
        temporary = temporary_name(os.path.join(root, TRACKER), tag)
        disk.write(temporary, [str(step).encode()])
        disk.rename(temporary, os.path.join(root, TRACKER))
        PosixStorage().sync(root) if isinstance(disk, PosixStorage) else disk.disk.sync(root)

    def publish_iteration(target, step, newest=True, emit=print):
        patch.setattr(iteration_publisher, "set_tracker", set_tracker)
        right(replace(target, storage=NoSync(target.storage)), step, newest, emit)

    patch.setattr(iteration_publisher, "publish_iteration", publish_iteration)


@found("prune", "kill all", LEFT, "remove", format=ITERATION)
def iteration_removed_without_rename(patch: Patch) -> None:
    def carry_out(directory, made, read_locks=None, emit=print, manifests=None):
        disk = directory.storage
        to_delete = [*made.to_delete, *made.orphans]
        for candidate in to_delete:
            storage_room.remove_tree(disk, candidate.commit_dir)
        garbage_collector.empty_trash(directory, read_locks or ReadLocks(directory))
        return to_delete

    patch_all(patch, "carry_out", carry_out)


def verdict_of(found: Cell) -> str:
    return LEFT if found.verdict == "PASS" and found.left else found.verdict


def cells_of_mutant(setup: Setup, task: Task, mutant: Mutant) -> Iterator[Cell]:
    for operation in task.operations:
        fault = Fault(operation.number, mutant.fault)
        if fault.hits(operation.name) and mutant.where in f"{operation.name} {operation.path}":
            yield cell(setup, task, fault)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Prints the table of docs/reliability.md: pytest -s tests/fault_injection/test_teeth.py."""
    rows: list[str] = []
    yield rows
    print(
        "\n"
        + "\n".join(["| mutant | found by | in | fault | cells |", "|---|---|---|---|---|", *rows])
    )


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}, {mutant.scenario}, {mutant.format}"
)
def test_a_mutant_is_found(mutant, folder, table):
    setup, fmt = Setup(folder, seed=mutant.seed), mutant.format
    (right,) = prepare(setup, [mutant.scenario], [fmt])
    with pytest.MonkeyPatch.context() as patch:
        mutant.mutate(patch)
        if mutant.verdict == CONTROL:
            table.append(
                f"| {mutant.name} | the scenario itself | {mutant.scenario}, {fmt} | "
                f"{mutant.fault} | 1 |"
            )
            if mutant.fault:
                assert (
                    runner.run_scenario(
                        setup, scenarios.SCENARIOS[mutant.scenario], fmt, Fault(FAR, mutant.fault)
                    )[1].verdict
                    != "PASS"
                )
            else:
                with pytest.raises(SaveError, match="without any fault"):
                    prepare(setup, [mutant.scenario], [fmt])
            return
        (task,) = prepare(setup, [mutant.scenario], [fmt])
        cells = (
            (number, found)
            for number, found in enumerate(cells_of_mutant(setup, task, mutant), 1)
            if verdict_of(found) != "PASS"
        )
        needed, found = next(cells, (0, None))
    assert found is not None, "the mutant survives"
    assert verdict_of(found) == mutant.verdict, found
    table.append(
        f"| {mutant.name} | {mutant.verdict} | {mutant.scenario}, {fmt} | {mutant.fault} | "
        f"{needed} |"
    )
    # ... and it was the mutant: the product passes when the same operation is struck.
    hit = [
        o.number
        for o in right.operations
        if (o.rank, o.name, o.path) == (found.rank, found.name, found.path)
    ]
    for number in hit[:2] or [min(found.operation, len(right.operations))]:
        fault = Fault(number, mutant.fault)
        assert (
            not fault.hits(right.operations[number - 1].name)
            or verdict_of(cell(setup, right, fault)) == "PASS"
        )


def test_every_verdict_has_a_mutant():
    assert {mutant.verdict for mutant in MUTANTS} == {
        HARD_FAIL,
        LOST_WORK,
        SILENT_DIVERGENCE,
        LEFT,
        CONTROL,
    }
    assert len({mutant.name for mutant in MUTANTS}) >= 20


# ---- defects that the seven scenarios do not reach: scenarios and disks of this test -------------


def verdict_of_run(
    patch: Patch,
    folder: str,
    scenario: Scenario,
    fault: Fault | None = None,
    disk: type[PosixStorage] = PosixStorage,
) -> str:
    """Returns the verdict of one run of a scenario."""
    patch.setattr(runner, "SCENARIOS", {**scenarios.SCENARIOS, scenario.name: scenario})
    return runner.run_scenario(Setup(folder, storage=disk), scenario, "safetensors", fault)[
        1
    ].verdict


class _TakenOver(Scenario):
    def work(self, sandbox: Sandbox, rank: int) -> None:
        """Run 1 was considered dead and continues."""
        try:
            shard_writer.write_shard(
                sandbox.target(rank, 0),
                scenarios.shard(sandbox.target(rank, 0), 30, sandbox.format),
            )
        except LeaseHeldError:
            return
        raise AssertionError("a run that lost its folder saves into it")


TAKEN_OVER = _TakenOver(
    "taken over", "a run that was considered dead wakes up", past=((0, 10), (1, 20))
)


def test_a_late_writer_without_a_fence(folder, monkeypatch):
    assert verdict_of_run(monkeypatch, folder, TAKEN_OVER) == "PASS"
    monkeypatch.setattr(shard_writer, "fence", lambda *args: None)
    assert verdict_of_run(monkeypatch, folder, TAKEN_OVER) == HARD_FAIL


class _SameNames(Scenario):
    def work(self, sandbox: Sandbox, rank: int) -> None:
        """Saves step 10 in another job under the names of the first run."""
        target, part = (
            sandbox.target(rank, 1),
            scenarios.shard(sandbox.target(rank, 1), 10, sandbox.format),
        )
        taken = scenarios.shard(sandbox.target(rank, 0), 10, sandbox.format).files[0].path
        shard_writer.write_shard(target, replace(part, files=(replace(part.files[0], path=taken),)))


SAME_NAMES = _SameNames("same names", "another job uses the names of the first run")


def test_files_that_are_overwritten(folder, monkeypatch):
    assert verdict_of_run(monkeypatch, folder, SAME_NAMES) == "PASS"
    assert {
        verdict_of_run(monkeypatch, folder, SAME_NAMES, Fault(at, "kill all"))
        for at in range(1, 12)
    } == {"PASS"}
    monkeypatch.setattr(RankStorage, "status", lambda self, path: None)  # "nothing is there"
    assert HARD_FAIL in [
        verdict_of_run(monkeypatch, folder, SAME_NAMES, Fault(at, "kill all"))
        for at in range(8, 20)
    ]


class Rotten(PosixStorage):
    """Corrupts the weights of step 30 without an error."""

    def rename(self, old, new):
        super().rename(old, new)
        if new.endswith("-3_10.safetensors"):
            with open(new, "r+b") as file:
                at = read_header(file, new).tensors["embedding.weight"].ranges[0][0]
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))


def test_a_disk_that_lies(folder, monkeypatch):
    save = scenarios.SCENARIOS["save"]
    # refused, and the step before is taken
    assert verdict_of_run(monkeypatch, folder, save, disk=Rotten) == LOST_WORK
    skip_verification(monkeypatch)
    assert verdict_of_run(monkeypatch, folder, save, disk=Rotten) == SILENT_DIVERGENCE

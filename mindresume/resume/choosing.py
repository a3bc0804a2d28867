"""Chooses the checkpoint with which a job begins, for both formats, on all ranks together; says in the log why, and protects it.

    found = Chooser(storage, group, settings, log, choose_complete, ...).choose(Request(path))
    found.choice                # None: a fresh start

    where the checkpoints lie that the path means ─▶ which ranks see that folder ─▶ wait until it is listed by whoever chooses
    ─▶ the choice (``selection.select_checkpoint``)
    ─▶ refusals are said ─▶ a fresh start or an error; else a hold until it is read, and a trial until a step is done
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from mindresume.agree import Group, Waiting, decide, report
from mindresume.errors import AgreementError, LoadError, MissingCheckpointError, NoUsableCheckpointError
from mindresume.events import (
    CandidateRefused,
    CheckpointSelected,
    Emit,
    FreshStart,
    Notice,
    VerifiedBytesKept,
    VisibilityWaited,
    warning,
)
from mindresume.events.progress import ProgressReporter
from mindresume.formats import MINDFORMERS
from mindresume.formats.location import find as find_checkpoints
from mindresume.host_memory import share_of_rank
from mindresume.resume.absent import StrategyOf, nobody_knows
from mindresume.resume.health import sick_files
from mindresume.resume.lost import Lost, lost_by_death
from mindresume.resume.prove import ProvenShard
from mindresume.resume.restore import RemoteSource
from mindresume.resume.select import Choice, describe, forget_kept
from mindresume.resume.selection import CheckpointSources, select_checkpoint
from mindresume.resume.selection_policy import SelectionPolicy, every_rank, own_rank
from mindresume.resume.witness import settle
from mindresume.settings import Settings
from mindresume.store.claim import Claim
from mindresume.store.holds import hold
from mindresume.store.islands import Islands, find, together
from mindresume.store.kept import KeptFiles, disk_of
from mindresume.store.remote import Remote
from mindresume.store.storage import Storage
from mindresume.store.trials import Trial


@dataclass(frozen=True)
class Request:
    """What a job asks for.

    ``path``: of a folder or a file. ``named``: one checkpoint in it. ``converts``: the number of ranks may differ, so all files
    are proven by all ranks together. ``resume`` False: weights alone are wanted, so there is no fresh start. ``as_it_is``: what
    mindformers saved on as many ranks as there are is not converted, so that it needs no layouts. ``instead``: ends a sentence
    on the weights of a fresh start. ``health``: the folder in which mindformers' health monitor records what it found unhealthy,
    which is not taken unless it is named; None: health does not matter. ``output``: the folder in which the job works, if it
    will say when its first step is done; None: it will not."""
    path: str
    named: str | None = None
    converts: bool = False
    resume: bool = True
    as_it_is: bool = False
    instead: str = "are initialised at random"
    health: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Selection:
    """What was chosen. ``choice`` None: a fresh start. ``converts``: it is loaded by way of its layouts. ``lost``: on rank 0,
    what a job that died had done behind it. ``hold``: keeps it from being removed; to be left when all ranks have read it.
    ``trial``: of it, until a step is done."""
    choice: Choice | None = None
    converts: bool = False
    lost: Lost | None = None
    hold: Claim | None = None
    trial: Trial | None = None


@dataclass(frozen=True)
class Chooser:
    """``storage``: by which the chosen checkpoint is verified and then loaded (``reads_once``). ``choose_complete(storage,
    path)``: chooses complete weights. ``strategy_of``: as of ``select``. ``remote``: where checkpoints are kept besides, for a
    resume from one of the folders ``saved_to()``. ``islands``: which ranks see the same folder, by its path, as far as it is
    known; what is found out is added."""
    storage: Storage
    group: Group
    settings: Settings
    emit: Emit
    choose_complete: Callable[[Storage, str], Choice]
    strategy_of: StrategyOf = nobody_knows
    remote: Remote | None = None
    saved_to: Callable[[], Collection[str]] = frozenset
    islands: dict[str, Islands] = field(default_factory=dict)

    def choose(self, request: Request) -> Selection:
        """Raises NoUsableCheckpointError, MissingCheckpointError, LoadError or AgreementError on all ranks together."""
        emit, group, disk = self.emit, self.group, disk_of(self.storage)
        path, named, resume = request.path, request.named, request.resume
        if named and _is_file(disk, path):
            emit(warning(f"resume_training: {named} is ignored, because load_checkpoint is a file: {path}"))
            named = None
        path = located(disk, path, group, emit)
        # asked of all alike, or some would wait for ever
        one = request.converts or any(report(group, lambda: _is_file(disk, path)))
        islands = together(group.size) if one else islands_of(disk, path, group, self.islands, emit)
        settled = settle(disk, path, group, islands)
        if settled.seconds or settled.unseen:
            emit(VisibilityWaited(settled.seconds, settled.unseen))
        choice = self._select(request, path, named, islands)
        for refusal in choice.refused:
            emit(CandidateRefused(refusal.step, refusal.reason, refusal.file, weights_only=not resume))
        for note in choice.notes:
            emit(Notice(note))
        if choice.chosen is None and settled.unseen:
            raise NoUsableCheckpointError(
                f"{path} seems to hold no checkpoint, but {'; '.join(settled.unseen)}. Nothing begins afresh beside them: look "
                f"whether all hosts have mounted the same folder, and start again")
        if choice.chosen is None:
            self._begin_afresh(request, path)
            return Selection()
        return self._protect(request, choice, request.converts or choice.consolidated)

    def _policy(self, request: Request, requested: str | None) -> SelectionPolicy:
        converts = request.converts
        return SelectionPolicy(
            None if converts else self.group.size, requested, self.settings.verify, every_rank if converts else own_rank,
            converts, self._unhealthy(request.health) if request.health is not None else None, self.settings.poison_limit,
            require_counters=request.resume)

    def _select(self, request: Request, path: str, requested: str | None, islands: Islands) -> Choice:
        if islands.apart:
            self.emit(Notice(f"the nodes share no disk below {path}: the newest checkpoint that all of them have is selected"))
        remote = RemoteSource(self.remote, self.saved_to) if self.remote is not None and request.resume else None
        sources = CheckpointSources(self.strategy_of, self.choose_complete, remote, islands)
        return select_checkpoint(self.storage, path, self.group, self._policy(request, requested), sources, self.emit,
                                 ProgressReporter("checking", self.emit))

    def _unhealthy(self, folder: str) -> Collection[str]:
        """Returns the names of unhealthy files, on rank 0, which decides."""
        names, trouble = sick_files(disk_of(self.storage), folder) if self.group.rank == 0 else (frozenset(), "")
        if trouble:
            self.emit(warning(trouble))
        return names

    def _begin_afresh(self, request: Request, path: str) -> None:
        """MissingCheckpointError if there is nothing to begin with."""
        forget_kept(self.storage)
        known = any(report(self.group, lambda: disk_of(self.storage).status(path) is not None))
        reason = "holds no checkpoint that was ever complete" if known else "does not exist"
        if not request.resume:
            raise MissingCheckpointError(f"{path} {reason}; weights to begin with were asked for (no_load_optim: True, "
                                         f"resume_training: False). Give another load_checkpoint (load_path), or none for random "
                                         f"weights")
        self.emit(FreshStart(path, reason, request.instead, is_expected=known))

    def _protect(self, request: Request, choice: Choice, converts: bool) -> Selection:
        """Holds what was chosen, and says what it is."""
        group, disk, chosen, resume = self.group, disk_of(self.storage), choice.chosen, request.resume
        lost = None
        if resume and group.rank == 0:
            with suppress(OSError):
                lost = lost_by_death(disk, choice.root, chosen)
        held = hold_chosen(disk, choice, group, self.islands, self.emit)
        try:
            trial = Trial(disk, choice.root, chosen, os.path.realpath(request.output), group.rank,
                          self.settings.poison_limit) if (
                resume and self.settings.poison_limit and request.output is not None) else None
            self.emit(CheckpointSelected(chosen.step, chosen.epoch, chosen.run, choice.root, describe(chosen, choice.complete),
                                         weights_only=not resume))
            self._report_kept(choice)
            if isinstance(self.storage, KeptFiles):
                self.storage.enough()
            for remark in choice.remarks:
                self.emit(warning(remark))
            if converts and request.as_it_is and group.size > 1 and chosen.origin == MINDFORMERS and not chosen.base:
                converts = not all(report(group, lambda: own_shard(choice, group) is not None))
        except BaseException:
            if held is not None:
                held.leave()
            raise
        return Selection(choice, converts, lost, held, trial)

    def _report_kept(self, choice: Choice) -> None:
        """Emits how much of the checkpoint is read a second time."""
        storage = self.storage
        if not isinstance(storage, KeptFiles) or choice.chosen.origin == MINDFORMERS:
            return                                          # without checksums nothing but headers was read
        read = sum(source.file.size or 0 for shard in choice.shards for source in shard.sources)
        if read or storage.size:
            self.emit(VerifiedBytesKept(storage.size, max(read - storage.size, 0), storage.budget))


def reads_once(storage: Storage, settings: Settings, group: Group) -> Storage:
    """Returns the storage of a choice, which keeps what is verified in memory until it is loaded: as much as half of this rank's
    share of the host's memory, because the arrays into which it is loaded need the other half, and no more than ``staging_gib``.
    All ranks call it together."""
    if settings.verify != "full":
        return storage
    budget = share_of_rank(group) // 2
    if settings.staging_gib:
        budget = min(budget, int(settings.staging_gib * 2**30))
    return KeptFiles(storage, budget)


def located(storage: Storage, path: str, group: Group, emit: Emit) -> str:
    """Where the checkpoints lie that ``path`` means (``formats.location``), the same on all ranks. Where nodes share no disk some
    have none, and what the others find counts. MissingCheckpointError on all ranks if they find several."""
    def look() -> list[str]:
        try:
            return [find_checkpoints(storage, path) or "", ""]
        except MissingCheckpointError as error:
            return ["", str(error)]
    rows = [decide(group, look, Waiting(f"looking for checkpoints below {path}"))]
    if rows == [["", ""]]:
        rows = report(group, look, Waiting(f"looking for checkpoints below {path}"))
    places, several = sorted({place for place, _ in rows if place}), next((text for _, text in rows if text), "")
    if len(places) > 1:
        several = f"the ranks of this job find checkpoints in different folders: {', '.join(places)}; give one of them"
    if several:
        raise MissingCheckpointError(several)
    if not places or places[0] == path:
        return path
    emit(Notice(f"{path} holds no checkpoints itself; those in {places[0]} count"))
    return places[0]


def islands_of(storage: Storage, path: str, group: Group, known: dict[str, Islands], emit: Emit) -> Islands:
    """Which ranks see the same folder. Where one of them has none, or cannot write, nobody can look: they are taken for one."""
    root = os.path.realpath(path)
    if root not in known:
        if not any(report(group, lambda: storage.status(root) is not None)):
            return together(group.size)
        try:
            known[root] = find(storage, root, group)
        except AgreementError as error:
            emit(Notice(f"{root} is taken for a folder that all nodes share: {error}"))
            return together(group.size)                 # not remembered: whoever saves there has to know
    return known[root]


def hold_chosen(storage: Storage, choice: Choice, group: Group, known: dict[str, Islands], emit: Emit) -> Claim | None:
    """Rank 0 (of nodes that share no disk the first rank of each) says that the chosen checkpoint is being read, so that neither
    retention of a job that still saves there nor ``mindresume prune`` removes it. A folder that cannot be written to is read all
    the same. Returns the claim, None: there is none. LoadError on all ranks if it was removed between the choice and now."""
    chosen = choice.chosen
    if chosen.attempt is None:
        return None
    held: list[Claim] = []

    def work() -> bool:
        try:
            claim = hold(storage, choice.root, chosen.name, chosen.box)
        except OSError as error:
            emit(Notice(f"{choice.root} is read without a claim on it: {error}"))
            return True
        held.extend([claim] if claim is not None else [])
        return claim is not None
    islands = known.get(os.path.realpath(choice.root), together(group.size))
    try:
        if not all(report(group, lambda: work() if islands.leads(group.rank) else True)):
            raise LoadError(f"{chosen.attempt} was removed while it was chosen; start the job again")
    except BaseException:
        for claim in held:
            claim.leave()
        raise
    return held[0] if held else None


def own_shard(choice: Choice | None, group: Group) -> ProvenShard | None:
    """Returns what this rank proved of the chosen checkpoint and loads; None if that is of another number of ranks (it is
    converted then)."""
    chosen = choice.chosen if choice else None
    shards = choice.shards if chosen and chosen.world_size == group.size else ()
    return next((shard for shard in shards if shard.rank == group.rank), None)


def _is_file(storage: Storage, path: str) -> bool:
    with suppress(OSError, ValueError):
        status = storage.status(path)
        return status is not None and not status.is_folder
    return False

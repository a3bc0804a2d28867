"""The choice of a checkpoint in the trainer, for both formats: agreed by all ranks, said in the log, and held until it is
read."""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from mindresume.agree import Group, Waiting, decide, report
from mindresume.errors import AgreementError, LoadError, MissingCheckpointError, NoUsableCheckpointError
from mindresume.formats import MINDFORMERS, Candidate
from mindresume.formats.location import find as find_checkpoints
from mindresume.host_memory import share_of_rank
from mindresume.plugin import adapter, modelarts, session, telling
from mindresume.plugin.convert import choose_complete, is_complete_resume, prepare
from mindresume.reshard.strategies import strategies
from mindresume.resume.apart import select_apart
from mindresume.resume.health import sick_files
from mindresume.resume.lost import lost_by_death
from mindresume.resume.prove import read_size
from mindresume.resume.select import Choice, describe, select
from mindresume.resume.witness import settle
from mindresume.store.claim import hold
from mindresume.store.islands import Islands, find, together
from mindresume.store.kept import KeptFiles, disk_of
from mindresume.store.storage import PosixStorage, Storage
from mindresume.store.trials import Trial
from mindresume.words import size_text


def choose(config: Any, path: str, named: str | None, current: session.Session, storage: Storage, converts: bool,
           resume: bool = True, healthy: bool = False, as_it_is: bool = False, instead: str = "are initialised at random"
           ) -> Choice | None:
    """None: a fresh start. ``converts``: the number of ranks may differ, so all files are proven by all ranks together, and
    ``current.open_source`` is set. ``resume`` False: weights alone are wanted, so there is no fresh start. ``healthy``:
    what mindformers' health monitor found unhealthy is not taken, unless it is named. ``as_it_is``: what mindformers saved on as
    many ranks as there are is not converted, so that it needs no layouts. ``instead``: ends a sentence on the weights
    of a fresh start.

    Raises NoUsableCheckpointError, MissingCheckpointError or AgreementError on all ranks together."""
    log, group, disk = adapter.logger(), current.group, disk_of(storage)
    if named and os.path.isfile(path):
        log.warning("mindresume: resume_training: %s is ignored, load_checkpoint is a file: %s", named, path)
        named = None
    path = located(disk, path, group)
    one = converts or any(report(group, lambda: os.path.isfile(path)))      # asked of all alike, or some would wait for ever
    islands = together(group.size) if one else islands_of(disk, path, current)
    settled = settle(disk, path, group, islands)
    if settled.seconds and not settled.unseen:
        log.info("mindresume: waited %d s until this host lists what the others see", settled.seconds)
    for sentence in settled.unseen:
        log.warning("mindresume: %s: the choice is made without it", sentence)
    sick, remote = _sick(config, disk, group.rank) if healthy else None, current.remote if resume else None

    def forget(_: Any = None) -> None:
        if isinstance(storage, KeptFiles):
            storage.forget()                            # what was refused, and what a download has replaced

    def anew(chooses: Callable[[], Choice]) -> Choice:
        forget()
        return chooses()
    if islands.apart:
        log.info("mindresume: the nodes share no disk below %s: the newest checkpoint that all of them have is looked for", path)
        pick = partial(anew, partial(select_apart, storage, path, group, named, current.settings.verify == "full", sick, forget))
        choice = modelarts.choose(pick, config, path, named, remote, group, disk, False, islands, sick) if remote else pick()
    elif decide(group, lambda: is_complete_resume(disk, path, converts)):
        converts, choice = True, choose_complete(storage, path, current, resume)
    else:
        gauge, ranks = telling.gauge("checking"), partial(_share, group) if converts else None

        def next_one(candidate: Candidate) -> None:
            gauge.expect(read_size(candidate, _share(group, candidate)))
            forget()
        pick = partial(anew, partial(
            select, storage, path, group, None if converts else group.size, named, ranks, gauge.advance,
            on_candidate=next_one, complete=current.settings.verify == "full", sick=sick, counters=resume,
            poison_limit=current.settings.poison_limit,
            strategy_of=strategies(storage, config.get("src_strategy_path_or_dir") or None)))
        choice = modelarts.choose(pick, config, path, named, remote, group, disk, converts, None, sick,
                                  current.settings.poison_limit) if remote else pick()
    for refusal in choice.refused:
        log.warning("mindresume: not %s %s", "resuming from" if resume else "taking the weights of", refusal)
    for note in choice.notes:
        log.info("mindresume: %s", note)
    if choice.chosen is None and settled.unseen:
        raise NoUsableCheckpointError(
            f"{path} seems to hold no checkpoint, but {'; '.join(settled.unseen)}. Nothing begins afresh beside them: look "
            f"whether all hosts have mounted the same folder, and start again")
    if choice.chosen is None:
        forget()
        known = any(report(group, lambda: disk.status(path) is not None))
        reason = "holds no checkpoint that was ever complete" if known else "does not exist"
        if not resume:
            raise MissingCheckpointError(f"{path} {reason}; weights to begin with were asked for (no_load_optim: True, "
                                         f"resume_training: False). Give another load_checkpoint (load_path), or none for random "
                                         f"weights")
        (log.info if known else log.warning)("mindresume: fresh start: %s %s; weights %s", path, reason, instead)
        return None
    current.choice = current.resumed_from = choice
    if resume and group.rank == 0:
        with suppress(OSError):
            current.lost = lost_by_death(disk, choice.root, choice.chosen)
    hold_chosen(current, disk)
    if resume and current.settings.poison_limit and _has_monitor(config):
        current.trial = Trial(disk, choice.root, choice.chosen, os.path.realpath(adapter.output_root()), group.rank)
    step = "" if choice.chosen.step is None else f" step {choice.chosen.step}, epoch {choice.chosen.epoch},"
    log.info("mindresume: %s%s %s", "resume from" if resume else "weights of", step, describe(choice.chosen, choice.complete))
    _say_kept(storage, choice)
    if isinstance(storage, KeptFiles):
        storage.enough()
    for remark in choice.remarks:
        log.warning("mindresume: %s", remark)
    if converts and as_it_is and group.size > 1 and choice.chosen.origin == MINDFORMERS and not choice.chosen.base:
        converts = not all(report(group, lambda: current.shard is not None))
    if converts or choice.chosen.base:
        prepare(config, current, storage, aside=resume or adapter.is_parallel())
    return choice


def reads_once(current: session.Session) -> Storage:
    """Returns the storage of a choice, which keeps what is verified in memory until it is loaded: as much as half of this rank's
    share of the host's memory, because the arrays into which it is loaded need the other half, and no more than ``staging_gib``.
    All ranks call it together."""
    if current.settings.verify != "full":
        return PosixStorage()
    budget = share_of_rank(current.group) // 2
    if current.settings.staging_gib:
        budget = min(budget, int(current.settings.staging_gib * 2**30))
    return KeptFiles(PosixStorage(), budget)


def _say_kept(storage: Storage, choice: Choice) -> None:
    """Whether the checkpoint is read once."""
    if not isinstance(storage, KeptFiles) or choice.chosen.origin == MINDFORMERS:
        return                                          # without checksums nothing but headers was read
    read = sum(source.file.size or 0 for shard in choice.shards for source in shard.sources)
    if storage.size:
        adapter.logger().info("mindresume: %s of what was verified stays in memory until it is loaded", size_text(storage.size))
    if read > storage.size:
        adapter.logger().info("mindresume: %s of what was verified is read again when it is loaded: this rank may keep %s "
                              "(half of its share of the memory that is left; mindresume.staging_gib)",
                              size_text(read - storage.size), size_text(storage.budget))


def located(storage: Storage, path: str, group: Group) -> str:
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
    adapter.logger().info("mindresume: %s holds no checkpoints itself; those in %s count", path, places[0])
    return places[0]


def islands_of(storage: Storage, path: str, current: session.Session) -> Islands:
    """Which ranks see the same folder. Where one of them has none, or cannot write, nobody can look: they are taken for one."""
    root = os.path.realpath(path)
    if root not in current.islands:
        if not any(report(current.group, lambda: storage.status(root) is not None)):
            return together(current.group.size)
        try:
            current.islands[root] = find(storage, root, current.group)
        except AgreementError as error:
            adapter.logger().info("mindresume: %s is taken for a folder that all nodes share: %s", root, error)
            return together(current.group.size)         # not remembered: whoever saves there has to know
    return current.islands[root]


def hold_chosen(current: session.Session, storage: Storage) -> None:
    """Rank 0 (of nodes that share no disk the first rank of each) says that the chosen checkpoint is being read, so that neither
    retention of a job that still saves there nor ``mindresume prune`` removes it. A folder that cannot be written to is read all
    the same. LoadError on all ranks if it was removed between the choice and now."""
    chosen = current.choice.chosen
    if chosen.attempt is None:
        return

    def work() -> bool:
        try:
            current.hold = hold(storage, current.choice.root, chosen.name, chosen.box)
        except OSError as error:
            adapter.logger().info("mindresume: %s is read without a claim on it: %s", current.choice.root, error)
            return True
        return current.hold is not None
    islands = current.islands.get(os.path.realpath(current.choice.root), together(current.group.size))
    if not all(report(current.group, lambda: work() if islands.leads(current.group.rank) else True)):
        raise LoadError(f"{chosen.attempt} was removed while it was chosen; start the job again")


def _sick(config: Any, storage: Storage, rank: int) -> frozenset[str]:
    """Names of unhealthy files, on rank 0, which decides."""
    names, trouble = sick_files(storage, str(config.get("output_dir") or "")) if rank == 0 else (frozenset(), "")
    if trouble:
        adapter.logger().warning("mindresume: %s", trouble)
    return names


def _has_monitor(config: Any) -> bool:
    """Whether somebody will say that a step is done."""
    return any(callback.get("type") == adapter.ALIAS for callback in config.get("callbacks") or [])


def _share(group: Group, candidate: Candidate) -> list[int]:
    """Ranks of a checkpoint to convert that this rank proves. What mindformers wrote has its counters in the files alone."""
    own = [rank for rank in candidate.files if rank % group.size == group.rank]
    return own if candidate.state else sorted({min(candidate.files), *own})

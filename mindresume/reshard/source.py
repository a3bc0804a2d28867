"""What the user names, opened as weights: a checkpoint folder, one step of it, merged weights or a single file.

    source = open_source(storage, "output/checkpoint", step=200)
    source.weights.tensors, source.state, source.identity

    with reading(storage, "output/checkpoint") as source: ...       # a job that saves there does not remove it meanwhile
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mindresume.errors import (
    ConfigError,
    DamagedFileError,
    MindResumeError,
    MissingCheckpointError,
    NoUsableCheckpointError,
    StrategyError,
)
from mindresume.formats import OURS, Candidate, Refusal, steps_text
from mindresume.formats.complete import FILE, is_complete, read_complete
from mindresume.formats.names import FileName, parse_name
from mindresume.formats.scalar_state import is_without_step, state_from_scalars
from mindresume.formatting import ranks_count
from mindresume.reshard.copies import check_copies
from mindresume.reshard.geometry import whole
from mindresume.reshard.iteration import of_iteration
from mindresume.reshard.made import Made, check_names, made_of
from mindresume.reshard.strategies import identity_of, stamp, strategy_for
from mindresume.reshard.weights import Weights, of_candidate, of_complete
from mindresume.resume.prove import verify_rank
from mindresume.resume.select import candidates_for
from mindresume.resume.understood import IterationMetadata
from mindresume.state import TrainingState, is_count, is_number
from mindresume.store.claim import Claim
from mindresume.store.holds import hold
from mindresume.store.storage import Storage, parallel
from mindresume.strategy import Strategy

_TRIES = 10                     # looks at a folder in which a job completes and removes checkpoints


@dataclass(frozen=True)
class Source:
    """``state`` None: nothing there says which step it is. ``name``: how its files are called, None for other names. ``folder``:
    into which nothing is written, None for a single file. ``identity``: a value for JSON; equal for equal bytes as far as can be
    told without reading them. ``refused``: newer checkpoints that were not taken. ``made``: of complete weights that mindresume
    wrote, what it says of them."""
    weights: Weights
    state: TrainingState | None
    name: FileName | None
    identity: Any
    what: str
    folder: str | None = None
    candidate: Candidate | None = None
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    made: Made | None = None

    @property
    def is_iteration(self) -> bool:
        """Of Checkpoint 2.0: what its steps are is in ``common.json``."""
        return self.candidate is not None and bool(self.candidate.base)


Keep = Callable[[str, Candidate], None]


class _Gone(MissingCheckpointError):
    """A job has removed it, or given it its final name: what is there has to be looked for anew."""


@contextmanager
def reading(storage: Storage, path: str, step: int | None = None, strategy: str | None = None,
            log: Callable[[str], None] = lambda text: None) -> Iterator[Source]:
    """Opens a source as ``open_source`` does, and holds the checkpoint until the end of the block: neither a job nor ``prune``
    removes it meanwhile. Where nothing can be written it is read all the same; ``log`` says so."""
    held: list[Claim] = []

    def leave() -> None:
        while held:
            held.pop().leave()

    def keep(root: str, candidate: Candidate) -> None:
        leave()
        claim = hold_candidate(storage, root, candidate, log)
        if claim is not None:
            held.append(claim)

    try:
        yield open_source(storage, path, step, strategy, keep)
    finally:
        leave()


def hold_candidate(storage: Storage, root: str, candidate: Candidate, log: Callable[[str], None] = lambda text: None
                   ) -> Claim | None:
    """Returns what keeps jobs and ``prune`` from removing a checkpoint until its ``leave()``; None where nobody removes it, and
    where nothing can be written: then ``log`` says so. MissingCheckpointError if it is gone already."""
    if candidate.origin != OURS or not candidate.box:           # mindresume removes nothing else
        return None
    try:
        claim = hold(storage, root, candidate.name, candidate.box)
    except OSError as error:
        log(f"step {candidate.step} of {root} cannot be held while it is read, and may be removed: {error}")
        return None
    if claim is None:
        raise _Gone(f"step {candidate.step} of {root} was removed before it could be read")
    return claim


def open_source(storage: Storage, path: str, step: int | None = None, strategy: str | None = None,
                keep: Keep = lambda root, candidate: None) -> Source:
    """``step``: of a folder with several, default the newest that is whole. ``strategy``: file or folder, needed for what
    mindformers wrote on several ranks unless the folder ``strategy`` lies beside. Headers and records are checked, no tensor is
    read. ``keep(root, candidate)``: called before the files of a checkpoint are looked at. MissingCheckpointError,
    NoUsableCheckpointError, StrategyError, DamagedFileError."""
    if is_complete(storage, path):
        if strategy is not None:
            raise ConfigError(f"{path} holds complete weights, which no strategy cuts; leave {strategy} away")
        return open_complete(storage, path, step)
    for left in reversed(range(_TRIES)):
        try:
            return _newest(storage, path, step, strategy, keep)
        except _Gone:
            if not left:
                raise
    raise AssertionError


def _newest(storage: Storage, path: str, step: int | None, strategy: str | None, keep: Keep) -> Source:
    """_Gone if what is there changes while it is looked at."""
    found, insists = candidates_for(storage, path)
    if found.strange:
        raise MissingCheckpointError(found.strange)
    wanted = [c for c in found.candidates if step is None or c.step == step]
    if not wanted:
        raise MissingCheckpointError(f"{path} has no checkpoint" if step is None else
                                     f"{path} has no step {step}; {steps_text(found.candidates)}")
    refused: list[Refusal] = []
    for candidate in wanted:
        try:
            keep(found.root, candidate)
            return replace(open_candidate(storage, found.root, candidate, strategy), refused=tuple(refused), notes=found.notes)
        except _Gone:
            raise
        except MindResumeError as error:
            if candidate.box and storage.status(candidate.box) is None:
                raise _Gone(f"step {candidate.step} of {found.root} was removed while it was opened") from error
            if insists or step is not None or len(wanted) == 1:
                raise
            refused.append(candidate.refuse(str(error)))
    raise NoUsableCheckpointError(f"{path} holds checkpoints, but none can be used:\n"
                                  + "\n".join(f"  {refusal}" for refusal in refused), refused)


def open_candidate(storage: Storage, root: str, candidate: Candidate, strategy: str | None = None) -> Source:
    """One saved step of rank folders."""
    if candidate.problem is not None and not is_without_step(candidate):
        raise NoUsableCheckpointError(f"{root}: {candidate.problem}", (candidate.problem,))
    identity = identity_of(storage, root, candidate)
    if candidate.base and strategy is not None:
        raise ConfigError(f"{os.path.join(root, candidate.base)} knows its layouts; leave {strategy} away")
    layouts = None if candidate.base else strategy_for(storage, root, candidate, strategy, identity)
    candidate = counted(root, candidate, layouts)
    known = IterationMetadata(storage, root, candidate)
    proofs = parallel(storage, lambda rank: verify_rank(storage, root, candidate, rank, full=False, layouts=known),
                      sorted(candidate.files))
    for proof in proofs:
        if isinstance(proof, Refusal):
            raise DamagedFileError(os.path.join(root, proof.file or ""), str(proof))
    source = source_of(storage, root, candidate, layouts, identity, proofs[0].scalars)
    cover(source.weights)
    check_copies(source.weights)
    return source


def source_of(storage: Storage, root: str, candidate: Candidate, strategy: Strategy | None, identity: Any,
              scalars: Mapping[str, Any]) -> Source:
    """A candidate of ``counted`` ranks that somebody has proven. ``scalars``: counters of its first file, for one without
    records. StrategyError and LoadError: see ``of_candidate``."""
    name = parse_name(os.path.basename(candidate.first.path))
    state = candidate.state or state_of(scalars, name)
    weights = of_iteration(storage, root, candidate) if candidate.base else of_candidate(storage, root, candidate, strategy)
    what = f"{weights.name}, {'weights only' if state is None else f'step {state.step}'}, {ranks_count(weights.world_size)}"
    return Source(weights, state, name, identity, what, root, candidate)


def counted(root: str, candidate: Candidate, strategy: Strategy | None) -> Candidate:
    """With the number of ranks by the strategy, where a scan could only count files. StrategyError if there are files of more
    ranks."""
    if candidate.origin == OURS or strategy is None:
        return candidate
    beyond = [rank for rank in candidate.files if rank >= strategy.world_size]
    if beyond:
        raise StrategyError(f"{root}, step {candidate.step}: {candidate.files[beyond[0]][0].path} is of rank {beyond[0]}, the "
                            f"strategy {strategy.source} is of {ranks_count(strategy.world_size)}")
    return replace(candidate, world_size=strategy.world_size)


def open_complete(storage: Storage, path: str, step: int | None = None) -> Source:
    """Merged weights, of MindSpore or Hugging Face. Errors as of ``read_complete``; DamagedFileError if they are ours, and have
    other tensors than were written."""
    found = read_complete(storage, path)
    state = state_of(found.scalars, None)
    if step is not None and (state is None or state.step != step):
        raise MissingCheckpointError(f"{path} holds {'no step' if state is None else f'step {state.step}'}, not step {step}")
    paths = [os.path.join(found.root, file) for file in found.files]
    weights, made = of_complete(storage, found), made_of(storage, path)
    if made is not None:
        if found.kind != FILE:
            check_names(made, found.root, found.tensors)
        weights = replace(weights, checksum=lambda rank, name: made.tensors.get(name))
    return Source(weights, state, None, [stamp(storage, p) for p in paths],
                  f"{path}, complete weights{'' if state is None else f' of step {state.step}'}",
                  None if found.kind == FILE else found.root, notes=found.notes, made=made)


def cover(weights: Weights) -> None:
    """LoadError or DamagedFileError unless every piece of every tensor is in some file. Looks at every header."""
    for tensor in weights.tensors.values():
        for cut in tensor.cuts(whole(tensor.shape)):
            weights.place(tensor.name, cut)


def state_of(scalars: Mapping[str, Any], name: FileName | None) -> TrainingState | None:
    """From the counters that mindformers writes into its files. Steps per epoch follow from the name where it tells."""
    step = scalars.get("step_num")
    if not is_count(step, 1):
        return None
    epoch = name.epoch if name else _count(scalars.get("epoch_num"), 1) or 1
    scale = scalars.get("loss_scale")
    return state_from_scalars(step, epoch, _count(scalars.get("global_step")) or step,
                              _count(scalars.get("global_batch_size"), 1), float(scale) if is_number(scale) else None,
                              name.step if name else 0)


def _count(value: Any, least: int = 0) -> int | None:
    """A counter that may have been kept as a float; None if it counts nothing."""
    value = int(value) if is_number(value) else None
    return value if is_count(value, least) else None

"""A training moves into its folder of checkpoints: which ranks see the same folder, who commits there, under which run and names.

    home = move_in(storage, root, prefix, current, iterations=False)       # on all ranks together
    home.place                                                             # for everything that is saved
    home.leave()
"""
from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindresume.agree import Waiting, decide, report
from mindresume.errors import ConfigError
from mindresume.formats.names import folder_name, free_suffix, parse_name
from mindresume.formats.records import listed, scan_records
from mindresume.plugin import adapter, modelarts, session
from mindresume.store.claim import SAVING, Claim, occupy, owner_of_this_process
from mindresume.store.common import forget
from mindresume.store.exchange import Exchange
from mindresume.store.islands import Islands, check_alone, find, next_common_run
from mindresume.store.lineage import continued, others
from mindresume.store.probe import examine
from mindresume.store.shard import Place
from mindresume.store.storage import Storage

_CLAIMS: dict[str, Claim] = {}          # of this process, by folder: it trains one thing at a time


@dataclass
class Residence:
    """``suffix``: of the names of files, the same on all ranks. ``leads``: this rank commits and prunes. ``claim``: of those.
    ``exchange``: of nodes that share no disk."""
    place: Place
    suffix: int
    islands: Islands
    claim: Claim | None
    exchange: Exchange

    @property
    def leads(self) -> bool:
        return self.islands.leads(self.place.rank)

    def reached(self, step: int) -> None:
        """The next sign of life says so."""
        if self.claim is not None:
            self.claim.step = step

    def leave(self) -> None:
        if self.claim is not None:
            self.claim.leave()

    # ---- nodes that share no disk tell each other what they have ---------------------------------------------------------

    def told(self, rows: Sequence[Any]) -> None:
        """``rows``: news of all ranks."""
        try:
            self.exchange.told(rows)
        except OSError as error:                        # nothing newer than the last note goes
            adapter.logger().warning("mindresume: %s: %s", self.place.root, error)

    def begin(self, current: session.Session) -> None:
        """The checkpoint that all nodes are known to have stays until they all have a newer one."""
        storage, root = self.place.storage, self.place.root
        if self.leads:
            self._say_others()
        if not self.islands.apart:
            if self.leads:
                try:
                    forget(storage, root)
                except OSError as error:                # with it more stays than must; no rank ends alone for that
                    adapter.logger().warning("mindresume: %s: %s", root, error)
            return
        adapter.logger().warning("mindresume: the nodes share no disk at %s: each keeps what its own ranks save, here rank %s, "
                                 "and a resume takes the newest checkpoint that all of them have", root, listed(self.place.part))
        chosen = current.choice.chosen if current.resumes and current.choice.root == root else None
        try:
            self.exchange.note(chosen.name if chosen is not None else "")
        except OSError as error:
            adapter.logger().warning("mindresume: %s: %s", root, error)

    def _say_others(self) -> None:
        """Checkpoints of another training in this folder: retention leaves them alone, so somebody must know."""
        storage, root = self.place.storage, self.place.root
        try:
            rows = others(scan_records(storage, root)[0], self.place.lineage)
        except OSError as error:
            adapter.logger().info("mindresume: whether %s holds checkpoints of another training is not known: %s", root, error)
            return
        if rows:
            steps = sorted({candidate.step or 0 for candidate in rows})
            adapter.logger().warning("mindresume: %s holds %d checkpoint(s) of another training, step %s, which this run does "
                                     "not continue. They are not counted and never removed: mindresume prune --all-trainings "
                                     "does that; or give each training an output_dir of its own", root, len(rows), listed(steps))


def move_in(storage: Storage, root: str, prefix: str, current: session.Session, iterations: bool) -> Residence:
    """Raises AgreementError on all ranks if one cannot save there (SaveError, FolderInUseError), ConfigError for Checkpoint 2.0
    where nodes share no disk."""
    group = current.group
    decide(group, lambda: examine(storage, root))
    islands = _islands_of(storage, root, current, iterations)
    run = next_common_run(storage, root, group) if islands.apart else ""
    claims: list[Claim] = []

    def claim() -> tuple[str, int] | None:
        if not islands.leads(group.rank):
            return None
        if group.rank != 0:
            examine(storage, root)
        claims.append(_occupy(storage, root, group.size, run, iterations))
        return claims[0].run, _unused_suffix(storage, root, prefix)
    # Rank 0 may have to watch the claim of another job for some minutes, but not as long as this waits for it.
    rows = report(group, claim, Waiting("claiming the folder"))
    if islands.apart:                                   # if they are not after all, two of them have now claimed one folder
        report(group, lambda: [check_alone(own) for own in claims] and None)
    folder = os.path.join(root, folder_name(group.rank))
    suffixes = report(group, lambda: 0 if iterations else free_suffix(storage.list(folder), prefix, group.rank))
    part = islands.ranks(group.rank) if islands.apart else ()
    place = Place(storage, root, rows[0][0], group.rank, group.size, iterations, part, _lineage(root, rows[0][0], current))
    home = Residence(place, max([row[1] for row in rows if row] + suffixes), islands, claims[0] if claims else None,
                     Exchange(storage, root, place.run, islands, group.rank))
    atexit.register(home.leave)
    return home


def _lineage(root: str, run: str, current: session.Session) -> str:
    """The same on all ranks, as the choice is."""
    if not current.resumes:
        return continued(None, run, True)
    origin = current.resumed_from or current.choice
    return continued(origin.chosen, run, os.path.realpath(origin.root) == os.path.realpath(root))


def _islands_of(storage: Storage, root: str, current: session.Session, iterations: bool) -> Islands:
    if root not in current.islands:
        current.islands[root] = find(storage, root, current.group)
    islands = current.islands[root]
    if islands.apart and iterations:
        blind = [rank for rank, leader in enumerate(islands.leaders) if leader != islands.leaders[0]]
        raise ConfigError(f"Checkpoint 2.0 is not supported in non-shared storage environments with multiple hosts: rank "
                          f"{listed(blind)} cannot see what rank 0 writes to {root}. Put save_path (output_dir) on a disk that "
                          f"all nodes share, and name it in SHARED_PATHS; or set use_legacy_format: True")
    return islands


def _occupy(storage: Storage, root: str, world_size: int, run: str, iterations: bool) -> Claim:
    """``run``: its name; empty: the next one."""
    beat = session.current().settings.heartbeat
    if root in _CLAIMS:                                 # an earlier training of this process, which is over
        _CLAIMS.pop(root).leave()
    modelarts.number_runs(session.current().remote, storage, root)
    claim = occupy(storage, root, replace(owner_of_this_process(SAVING, world_size), run=run), beat,
                   lambda text: adapter.logger().info("mindresume: %s", text), traced=iterations)
    _CLAIMS[root] = claim.start()
    return _CLAIMS[root]


def _unused_suffix(storage: Storage, root: str, prefix: str) -> int:
    """The smallest that no record knows: rank folders can have been deleted by hand, and names with records are never used
    again."""
    names = [parse_name(os.path.basename(path)) for path in scan_records(storage, root)[1]]
    return max((name.suffix + 1 for name in names if name and name.prefix == prefix), default=0)

"""The policy of a selection: which checkpoint is wanted, and how it is verified before it is chosen."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mindresume.coordination.collectives import Group
from mindresume.formats import Candidate

FULL, QUICK = "full", "quick"               # verification levels: every byte; only names, sizes and headers
RanksToVerify = Callable[[Group, Candidate], Sequence[int]]


def own_rank(group: Group, candidate: Candidate) -> Sequence[int]:
    """Returns the rank of this process: the job has as many ranks as the checkpoint, and each verifies what it loads."""
    return [group.rank]


def every_rank(group: Group, candidate: Candidate) -> Sequence[int]:
    """Returns this process's share of all ranks of the checkpoint; a single process verifies all of them.

    Checkpoints of mindformers keep their counters only in the files, so each process also verifies the first rank of them."""
    own = [rank for rank in candidate.files if rank % group.size == group.rank]
    return own if candidate.state else sorted({min(candidate.files), *own})


@dataclass(frozen=True)
class SelectionPolicy:
    """What a selection accepts. If ranks have different policies, the one of rank 0 decides which candidates are offered.

    Args:
        world_size: number of ranks of the job that would resume. None: any number; the number of ranks of a checkpoint is then
            taken from its manifest, else from the strategy files, else it is estimated (``Scan.expected_ranks``).
        requested: file name, iteration folder or step that the user asked for (``resume_training: NAME``). Nothing else is
            considered, and health and failed loads are ignored. None: the newest usable checkpoint.
        verify: FULL or QUICK.
        ranks_to_verify: which ranks of the checkpoint this process verifies.
        any_layout: the checkpoint may be loaded in another layout, so a single file counts as consolidated weights.
        unhealthy: names of files that mindformers' health monitor found unhealthy. They are refused, and so is a checkpoint whose
            own state says so. None: health is ignored.
        max_failed_loads: a checkpoint is taken last if so many jobs in a row died after they loaded it (``saving.crash_loop``).
            0: no limit.
        require_counters: refuse files that hold no step number. False: weights alone are wanted.
    """
    world_size: int | None = None
    requested: str | None = None
    verify: str = FULL
    ranks_to_verify: RanksToVerify = own_rank
    any_layout: bool = False
    unhealthy: Collection[str] | None = None
    max_failed_loads: int = 0
    require_counters: bool = True

    @property
    def verifies_bytes(self) -> bool:
        """Whether every byte is read and compared with its checksum."""
        return self.verify == FULL

"""What one training of this process shares between the hooks and the CheckpointMonitor: settings, group, and the resume.

A process trains one thing at a time, and mindformers passes its functions nothing of ours; so there is one current session.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from mindresume.agree import Group, Solo
from mindresume.resume.prove import ProvenShard
from mindresume.resume.select import Choice
from mindresume.settings import Settings


@dataclass
class Session:
    """``choice`` with a chosen candidate: this training resumes, and ``shard`` is what this rank proved and loads."""
    settings: Settings = field(default_factory=Settings)
    group: Group = field(default_factory=Solo)
    choice: Choice | None = None
    training: bool = False                   # inside Trainer.train or finetune
    global_step: int = 0                     # of the optimizer, scaled to this run's global batch size
    dataset_size: int | None = None          # steps of one pass over the data
    sink_size: int | None = None             # None: not in sink mode

    @property
    def shard(self) -> ProvenShard | None:
        """What this rank proved and loads; None if the checkpoint has no such rank (it is converted then)."""
        shards = self.choice.shards if self.choice else ()
        return next((shard for shard in shards if shard.rank == self.group.rank), None)

    @property
    def resumes(self) -> bool:
        return self.choice is not None and self.choice.chosen is not None


_current = [Session()]


def current() -> Session:
    return _current[0]


def begin(session: Session) -> Session:
    """Makes it the current one."""
    _current[0] = session
    return session

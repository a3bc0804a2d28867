"""What one training of this process shares between the hooks and the CheckpointMonitor: settings, group, and the resume.

A process trains one thing at a time, and mindformers passes its functions nothing of ours; so there is one current session.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindresume.agree import Group, Solo
from mindresume.data import DataPosition
from mindresume.errors import ConfigError
from mindresume.reshard.source import Source
from mindresume.resume.account import SummaryRow
from mindresume.resume.choosing import own_shard
from mindresume.resume.lost import LostWork
from mindresume.resume.progress import ResumeProgress
from mindresume.resume.prove import VerifiedShard
from mindresume.resume.select import Choice
from mindresume.settings import Settings
from mindresume.store.claim import Claim
from mindresume.store.islands import Islands
from mindresume.store.kept import KeptFiles
from mindresume.store.remote import Remote
from mindresume.store.storage import PosixStorage, Storage
from mindresume.store.trials import PendingTrial, Trial


@dataclass
class Online:
    """Loading in Checkpoint 2.0. ``resume``: with optimizer and counters, else weights alone. ``folder``: what mindformers is
    shown. ``common``: what it reads as ``common.json`` there, once. ``model``: mindspore's, as soon as it is made.
    ``workers``: threads that read, 0: as many as make sense."""
    resume: bool
    balanced: bool
    folder: str
    pretrained: bool = False
    workers: int = 0
    config: Any = None
    model: Any = None
    common: dict[str, Any] | None = None


@dataclass(frozen=True)
class WeightsAlone:
    """Loading of weights alone in Checkpoint 1.0. ``path``: what mindformers is shown. ``trains``: a training begins with them;
    else they are evaluated, or predict. ``converts``: auto_trans_ckpt, as the user wrote it."""
    path: str
    trains: bool
    converts: bool


@dataclass(frozen=True)
class Origin:
    """Where this run began: its first step follows ``step``; ``consumed``: samples seen before, None not known."""
    step: int = 0
    position: DataPosition = DataPosition()
    consumed: int | None = 0


@dataclass
class Session:
    """``choice`` with a chosen candidate: this training resumes, and ``shard`` is what this rank proved and loads."""
    settings: Settings = field(default_factory=Settings)
    group: Group = field(default_factory=Solo)
    choice: Choice | None = None
    resumed_from: Choice | None = None       # the same before anything was converted
    training: bool = False                   # inside Trainer.train or finetune
    islands: dict[str, Islands] = field(default_factory=dict)    # which ranks see the same folder, by its path
    monitor: Any = None                      # the CheckpointMonitor that saves in this training
    lost: LostWork | None = None             # on rank 0: what a job that died had done behind the chosen checkpoint
    load_seconds: float = 0.0                # of choosing, reading and checking
    requests: Mapping[str, Any] = field(default_factory=dict)    # to leave, from before it began (store/preemption.py)
    left: str = ""                           # why it ended before its end, having saved its last step
    global_step: int = 0                     # of the optimizer, scaled to this run's global batch size
    identity: Mapping[str, str] = field(default_factory=dict)    # of the data set; empty: not known
    origin: Origin = field(default_factory=Origin)
    progress: ResumeProgress | None = None   # of a resume: where it goes on
    account: list[SummaryRow] = field(default_factory=list)      # of a resume, for people
    dataset_size: int | None = None          # steps of one pass over the data
    sink_size: int | None = None             # None: not in sink mode
    metrics: dict[str, float] = field(default_factory=dict)      # reported by the user, newest value each
    hold: Claim | None = None                # keeps the chosen checkpoint from being removed until all ranks have read it
    pending: PendingTrial = field(default_factory=PendingTrial)     # of the chosen checkpoint
    open_source: Callable[[], Source] | None = None     # the chosen checkpoint as weights, where the layout may be another
    online: Online | None = None             # Checkpoint 2.0: what is loaded, and how
    alone: WeightsAlone | None = None        # Checkpoint 1.0 without a resume
    task: str = ""                           # outside of a training: what is done with the network, evaluate or predict
    storage: Storage = field(default_factory=PosixStorage)      # by which the chosen checkpoint is verified, and then loaded
    remote: Remote | None = None             # ModelArts: where checkpoints are kept when the disks are gone

    @property
    def shard(self) -> VerifiedShard | None:
        """What this rank proved and loads; None if the checkpoint is of another number of ranks (it is converted then)."""
        return own_shard(self.choice, self.group)

    def data_at(self, step: int, batch: int | None) -> tuple[int | None, DataPosition | None]:
        """(samples seen, where the data stands) after ``step``; None where it is not known."""
        if not batch or not self.dataset_size:
            return None, None
        done, origin = step - self.origin.step, self.origin
        return (None if origin.consumed is None else origin.consumed + done * batch,
                origin.position.after(done, self.dataset_size, batch))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Its time counts as that of the load."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.load_seconds += time.monotonic() - started

    def loaded(self) -> None:
        """This rank has what it verified, or does without it: the memory is for the training."""
        if isinstance(self.storage, KeptFiles):
            self.storage.forget()

    def release(self) -> None:
        """The chosen checkpoint has been read, or nobody is going to."""
        self.loaded()
        if self.hold is not None:
            self.hold.leave()
            self.hold = None

    @property
    def trial(self) -> Trial | None:
        """Of the chosen checkpoint, until a step is done."""
        return self.pending.trial

    @trial.setter
    def trial(self, trial: Trial | None) -> None:
        self.pending.trial = trial

    def end_trial(self, error: BaseException | None = None) -> None:
        """A step is done; or this rank ends with ``error``."""
        self.pending.end(error)

    @property
    def resumes(self) -> bool:
        """Counters and optimizer too; weights alone are no resume."""
        return self.choice is not None and self.choice.chosen is not None and self.alone is None and (
            self.online is None or self.online.resume)


_current = [Session()]


def current() -> Session:
    return _current[0]


def begin(session: Session) -> Session:
    """Makes it the current one."""
    _current[0] = session
    return session


def report_metric(name: str, value: Any) -> None:
    """Remembers what was measured, for example the loss of an evaluation: every later save records the newest value, and
    ``mindresume.keep_best`` can go by it (rank 0's value counts). ``value``: a number, or a tensor or array of one element;
    one that is not finite makes the next saves go without this metric. ConfigError for anything else."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"report_metric: the name is {name!r}; expected a text that is not empty")
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
    if array.size != 1 or array.dtype.kind in "OSUb":
        raise ConfigError(f"report_metric: {name} is {value!r}; expected one number")
    number = float(array.reshape(-1)[0])
    if math.isfinite(number):
        current().metrics[name] = number
    else:
        current().metrics.pop(name, None)

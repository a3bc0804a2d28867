"""All errors a caller may want to tell apart. Each message says what, where, expected and found, and what to do."""
from __future__ import annotations

from collections.abc import Sequence


class MindResumeError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MindResumeError, ValueError):
    """A setting of the user is wrong or contradicts another one."""


class CorruptFileError(MindResumeError):
    """A file of a checkpoint is not what it should be: cut short, altered, or not of its format.

    ``path``: the file; ``reason``: expected and found; ``tensor``: the first tensor concerned, if known.
    """

    def __init__(self, path: str, reason: str, *, tensor: str | None = None):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason, self.tensor = str(path), reason, tensor


class RecordError(MindResumeError):
    """A record or manifest cannot be read: not JSON, of an unknown version, or a field is missing."""


class UnusableCheckpointError(MindResumeError):
    """There is no checkpoint to resume from, though there should be; ``refused``: those looked at, each with its reason."""

    def __init__(self, message: str, refused: Sequence[object] = ()):
        super().__init__(message)
        self.refused = tuple(refused)


class MissingCheckpointError(UnusableCheckpointError, FileNotFoundError):
    """The checkpoint that the user named is not there, or not whole, on every rank."""


class NoUsableCheckpointError(UnusableCheckpointError):
    """Checkpoints exist, but none can be used."""


class SaveError(MindResumeError):
    """A checkpoint could not be written; what was committed before is untouched."""


class OutOfSpaceError(SaveError):
    """The disk is full, or the quota is exhausted."""


class LeaseHeldError(SaveError):
    """Another job saves into this folder of checkpoints. The message names both."""


class RemoteError(MindResumeError):
    """The object store that remote_save_url names did not do what it was asked for, or belongs to a later run."""


class LoadError(MindResumeError):
    """The chosen checkpoint does not fit the network: a tensor is missing, or its shape or dtype differs."""


class StrategyError(MindResumeError, ValueError):
    """A strategy file is damaged, or contradicts itself or the files beside it; or a strategy cannot be written as one."""


class EngineError(MindResumeError):
    """MindSpore's transform of a checkpoint failed, wrote something else than it should, or cannot do what is asked for."""


class CollectiveError(MindResumeError):
    """The ranks of the job could not agree, or one of them reported an error."""


class ProgressError(MindResumeError, ValueError):
    """A step count cannot be carried over exactly, for example to another global batch size."""


class TrainingCompleteError(MindResumeError):
    """The checkpoint to resume from is already the end of the training; there is nothing left to do."""

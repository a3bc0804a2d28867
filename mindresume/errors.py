"""Defines the errors that a caller may want to tell apart. Each message says what happened, where,
what was expected and found, and what to do.

The code of a class names the kind of error in each release and language: docs/messages.md has what
to do. It is printed before the message, and is never given to another class."""

from __future__ import annotations

from collections.abc import Sequence


class MindResumeError(Exception):
    """Base class of every error that this package raises deliberately.

    Attributes:
        code: of its class, or of the nearest base that has one.
    """

    code = "MR-100"


class ConfigError(MindResumeError, ValueError):
    """A user setting is wrong or contradicts another one."""

    code = "MR-101"


class CorruptFileError(MindResumeError):
    """A file of a checkpoint is truncated, altered, or not of its format.

    Attributes:
        path: the file.
        reason: what was expected and found.
        tensor: the first tensor affected, if known.
    """

    code = "MR-201"

    def __init__(self, path: str, reason: str, *, tensor: str | None = None):
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason
        self.tensor = tensor


class UnreadableFileError(CorruptFileError):
    """A file exists and could not be read: the file system reported an error. Nothing is known of
    its content."""

    code = "MR-202"


class RecordError(MindResumeError):
    """A record or manifest cannot be read: it is not JSON, has an unknown version, or lacks a
    field."""

    code = "MR-203"


class UnusableCheckpointError(MindResumeError):
    """No checkpoint can be resumed from, although there should be one.

    Attributes:
        refused: the checkpoints that were examined, each with the reason for its refusal.
    """

    code = "MR-300"

    def __init__(self, message: str, refused: Sequence[object] = ()):
        super().__init__(message)
        self.refused = tuple(refused)


class MissingCheckpointError(UnusableCheckpointError, FileNotFoundError):
    """The requested checkpoint does not exist, or is not complete, on every rank."""

    code = "MR-301"


class NoUsableCheckpointError(UnusableCheckpointError):
    """Checkpoints exist, but none of them can be used."""

    code = "MR-302"


class SaveError(MindResumeError):
    """A checkpoint could not be written. Checkpoints that were committed before are unchanged."""

    code = "MR-401"


class OutOfSpaceError(SaveError):
    """The disk is full, or the quota is exhausted."""

    code = "MR-402"


class LeaseHeldError(SaveError):
    """Another job saves into this checkpoint directory. The message names both jobs."""

    code = "MR-403"


class RemoteError(MindResumeError):
    """An operation on the object store (remote_save_url) failed, or the checkpoints there belong to
    a later run."""

    code = "MR-501"


class LoadError(MindResumeError):
    """The selected checkpoint does not fit the network: a tensor is missing, or its shape or dtype
    differs."""

    code = "MR-601"


class AlteredWeightsError(MindResumeError):
    """Parameters changed between the load and the first step: a callback, or another loader, has
    put other weights there."""

    code = "MR-602"


class ResumeDifferenceError(MindResumeError):
    """A step that an earlier run had trained gave something else when it was trained again, and
    ``on_resume_difference`` is ``stop``."""

    code = "MR-605"


class BadStepError(MindResumeError):
    """A step was bad, and the guard ends the job; or the samples of a bad step come next, and the
    next start skips them.

    Attributes:
        status: exit status of the job: 67: another start goes on; 68: a person has to look first.
    """

    code = "MR-606"

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class StrategyError(MindResumeError, ValueError):
    """A strategy file is damaged, contradicts itself or the files beside it, or a strategy cannot
    be written to a file."""

    code = "MR-603"


class EngineError(MindResumeError):
    """MindSpore's checkpoint transform failed, wrote an unexpected result, or does not support the
    conversion."""

    code = "MR-604"


class CollectiveError(MindResumeError):
    """A collective operation failed: the ranks could not agree, or one of them reported an
    error."""

    code = "MR-701"


class ProcessLostError(CollectiveError):
    """A process of this launch did not come, ended, or does not answer."""

    code = "MR-702"


class ProgressError(MindResumeError, ValueError):
    """A step count cannot be converted exactly, for example to another global batch size."""

    code = "MR-801"


class TrainingCompleteError(MindResumeError):
    """The checkpoint to resume from is already at the end of the training; nothing is left to
    train."""

    code = "MR-802"

"""Guards against crash loops: counts the jobs that loaded a checkpoint and died before their first
step was done.

    {root}/.mindresume/trial-{key}                    by rank 0: all ranks have loaded the
                                                      checkpoint, the network is compiled
    {root}/.mindresume/death-{run}-rank_00003.json    by a rank that ends with an error before its
                                                      first step is done: the error
    {root}/.mindresume/death-{run}-signals            by rank 0: the numbers of signals
                                                      (``LoadAttempt._capture_signals``)

A platform restarts a job whenever it dies. If every job died of one checkpoint, that checkpoint
would be loaded for ever. So a job that dies after all ranks have loaded a checkpoint, and before
the first step is done, counts as a failed load of the checkpoint, unless the job was asked to end,
or an error of one of its ranks has another cause (``explanation``). After ``max_failed_loads``
failed loads in a row, by jobs with the same output folder, the checkpoint is suspected: a resume
uses it only if there is no other, and retention does not remove it. The first step that a job
finishes clears the suspicion.

A job that dies without an error may have been killed by the platform; it counts too, because most
crashes leave no error. If all errors came from one of several hosts, that host is suspected first,
and the checkpoint only after twice as many failed loads.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import ENDED_BY_US
from mindresume.errors import MindResumeError, RecordError
from mindresume.formats import Candidate, CheckpointDir
from mindresume.model.manifest import FOLDER, LOAD_ATTEMPTS, Run, record_name
from mindresume.storage import publish_json, read_document
from mindresume.typed import MAX_COUNT, Count, Limits, decode, parse_json

_FAILURE, _SIGNALS = "death-", "signals"
_MAX_BYTES = 1 << 20  # bytes of a file that are read
_MAX_CAUSE = 300  # characters of a cause
_MAX_FAILED_LOADS = 1000  # failed loads in one file
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
NO_ERROR = "no error was reported"
Cause = Annotated[str, Limits(0, _MAX_CAUSE)]


@dataclass(frozen=True)
class FailedLoad:
    """Describes a job that died after it had loaded a checkpoint. ``hosts``: number of its hosts.
    ``host``, ``rank``: where the error without another cause was raised; empty and None if no rank
    reported one."""

    run: Run
    cause: Cause = NO_ERROR
    host: Cause = ""
    rank: Count | None = None
    hosts: Annotated[int, Limits(1, MAX_COUNT)] = 1

    def __str__(self) -> str:
        return (
            self.cause
            if self.rank is None
            else f"{self.cause} (rank {self.rank}, host {self.host})"
        )


@dataclass(frozen=True)
class _LoadHistory:
    """Holds the load attempts of one checkpoint. ``output``: output folder of the jobs.
    ``deaths``: the failed loads that count. ``began``: the job of the last load attempt.

    Files of earlier versions ("2 /output") counted jobs that died for any reason, and are not
    used."""

    output: str
    deaths: tuple[FailedLoad, ...]
    began: FailedLoad | None


@dataclass(frozen=True)
class _Death:
    """Describes the error with which one rank ended. ``explained``: the cause other than the
    checkpoint, empty: none."""

    cause: Cause
    host: Cause
    rank: Count | None
    explained: str


# ---- reading -------------------------------------------------------------------------------------


def key_of(candidate: Candidate) -> str:
    """Returns the name of a candidate within its root: its folder of records, or for a checkpoint
    of mindformers its iteration folder or first file."""
    return (
        candidate.name
        or candidate.iteration_dir
        or os.path.basename(candidate.first.path if candidate.first else "")
    )


def load_attempts(directory: CheckpointDir) -> dict[str, tuple[FailedLoad, ...] | None]:
    """Returns {key: failed loads in a row} for every checkpoint with load attempts. The value is
    None if the file cannot be read: a damaged file must not exclude a checkpoint from the
    selection."""
    found = {}
    for name in directory.storage.list(directory.path(FOLDER)):
        if name.startswith(LOAD_ATTEMPTS):  # the name of a half-written file begins with a dot
            path = directory.path(FOLDER, name)
            history = read_document(directory.storage, path, _LoadHistory)
            found[name.removeprefix(LOAD_ATTEMPTS)] = (
                _counted(directory, history) if history else None
            )
    return found


def failed_loads_by_key(directory: CheckpointDir) -> dict[str, tuple[FailedLoad, ...]]:
    """Returns ``load_attempts`` without unreadable files; empty if the folder of records cannot be
    listed. For a selection."""
    try:
        return {
            key: failed_loads
            for key, failed_loads in load_attempts(directory).items()
            if failed_loads
        }
    except OSError:
        return {}


def suspicion(failed_loads: Sequence[FailedLoad], limit: int) -> str:
    """Returns why a checkpoint with these failed loads is suspected; empty: it is not."""
    if not limit or len(failed_loads) < limit * (2 if all_on_one_host(failed_loads) else 1):
        return ""
    where = f", all on host {failed_loads[0].host}" if all_on_one_host(failed_loads) else ""
    return (
        f"it is suspected: {len(failed_loads)} jobs in a row loaded it and died before their first "
        f"step was done{where}, the last one: {failed_loads[-1]} (mindresume.max_failed_loads: "
        f"{limit}); name it explicitly to load it all the same"
    )


def all_on_one_host(failed_loads: Sequence[FailedLoad]) -> bool:
    """Returns whether one of several hosts may be the cause of all failed loads."""
    return len({failed_load.host for failed_load in failed_loads}) == 1 and all(
        failed_load.host and failed_load.hosts > 1 for failed_load in failed_loads
    )


def warning(failed_loads: Sequence[FailedLoad], limit: int) -> str:
    """Returns a warning about a checkpoint that is not suspected yet; empty: none."""
    if not failed_loads or suspicion(failed_loads, limit):
        return ""
    jobs = "the job before" if len(failed_loads) == 1 else f"{len(failed_loads)} jobs in a row"
    one_host = all_on_one_host(failed_loads) and len(failed_loads) > 1
    host = f". All died on host {failed_loads[0].host}: check that host" if one_host else ""
    return (
        f"{jobs} loaded it and died before the first step was done, the last one: "
        f"{failed_loads[-1]}{host}"
    )


def _counted(directory: CheckpointDir, history: _LoadHistory) -> tuple[FailedLoad, ...]:
    """Returns the failed loads, with the job of the last attempt unless its end has another cause.
    That job is dead, because no other job would select a checkpoint otherwise; a job that is alive
    on another machine counts for now. A signal explains an end, unless it was the supervisor's,
    which ends what a failure has left."""
    if history.began is None:
        return history.deaths
    folder, prefix = directory.path(FOLDER), f"{_FAILURE}{history.began.run}-"
    explained = False
    for name in directory.storage.list(folder):
        if not name.startswith(prefix):
            continue
        try:
            with directory.storage.open(os.path.join(folder, name)) as file:
                data = file.read(_MAX_BYTES)
            if name == prefix + _SIGNALS:
                explained = (
                    explained
                    or ENDED_BY_US not in os.environ
                    and any(number in data for number in _STOP_SIGNALS)
                )
                continue
            failure = decode(_Death, parse_json(data), name)
            if not failure.explained:
                return (
                    *history.deaths,
                    replace(
                        history.began,
                        cause=failure.cause,
                        host=failure.host,
                        rank=failure.rank,
                    ),
                )
            explained = True
        except (OSError, ValueError, RecordError):
            # a rank reported something that cannot be read
            explained = True
    return history.deaths if explained else (*history.deaths, history.began)


# ---- the job -------------------------------------------------------------------------------------


class LoadAttempt:
    """The load attempt of one job, on one rank. ``output``: the output folder of the job.
    ``limit``: failed loads after which a checkpoint is suspected; 0: not known. ``run``: the run
    id. ``hosts``: number of hosts of the job."""

    def __init__(
        self,
        directory: CheckpointDir,
        candidate: Candidate,
        output: str,
        rank: int = 0,
        limit: int = 0,
    ):
        self.directory = directory
        self.output = output
        self.rank = rank
        self.limit = limit
        self.path = directory.path(FOLDER, LOAD_ATTEMPTS + key_of(candidate))
        self.run = ""
        self.hosts = 1
        self.begun = False
        # (our file, the descriptor that received the numbers before)
        self._signals: tuple[int, int] | None = None

    def begin(self) -> None:
        """Records that all ranks have loaded the checkpoint and the network is compiled: if the job
        dies from here on, the checkpoint may be the reason. Records nothing if the directory has no
        folder of records. Raises OSError."""
        self.begun = True
        if self.rank == 0 and self.directory.storage.status(os.path.dirname(self.path)) is not None:
            failed_loads, before = self._history()
            history = _LoadHistory(
                self.output,
                failed_loads[-_MAX_FAILED_LOADS:],
                FailedLoad(self.run, hosts=self.hosts),
            )
            publish_json(self.directory.storage, self.path, asdict(history), self.run)
            self._capture_signals()
            self._remove_failures(before)

    def passed(self) -> None:
        """Removes the files of the load attempt: a step is done, so jobs do not die of this
        checkpoint. Raises OSError."""
        if self.rank == 0:
            self._stop_capturing()
            self.directory.storage.remove(self.path)
            self._remove_failures(self.run)
            self._clear_others()

    def failed(self, error: BaseException) -> None:
        """Records why this rank ends before its first step is done. Raises OSError."""
        self._stop_capturing()
        if self.begun and self.directory.storage.status(self.path) is not None:
            why = explanation(error)
            text = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_CAUSE]
            publish_json(
                self.directory.storage,
                self._failure_path(record_name(self.rank)),
                {"cause": text, "host": runtime.gethostname(), "rank": self.rank, "explained": why},
                self.run,
            )

    def refused(self, run: str, cause: str) -> None:
        """Counts this load as failed, of a checkpoint of ``run`` that cannot be loaded here: jobs
        would fail alike for ever. Raises OSError."""
        if self.rank == 0 and self.directory.storage.status(os.path.dirname(self.path)) is not None:
            loads = (*self._history()[0], FailedLoad(run, cause))
            history = _LoadHistory(self.output, loads[-_MAX_FAILED_LOADS:], None)
            publish_json(self.directory.storage, self.path, asdict(history), run)

    def _history(self) -> tuple[tuple[FailedLoad, ...], str]:
        """Returns the failed loads that count for this output folder, and the run of the load
        attempt before; empty: there was none."""
        before = read_document(self.directory.storage, self.path, _LoadHistory)
        if before is None:
            return (), ""
        failed_loads = _counted(self.directory, before) if before.output == self.output else ()
        return failed_loads, before.began.run if before.began else ""

    def _clear_others(self) -> None:
        """Removes the load attempts of jobs with this output folder on other checkpoints that are
        not suspected. The training continues from this checkpoint, so no job would clear them, and
        retention keeps a checkpoint with failed loads."""
        folder = os.path.dirname(self.path)
        for name in self.directory.storage.list(folder) if self.limit else ():
            if name.startswith(LOAD_ATTEMPTS):
                path = os.path.join(folder, name)
                history = read_document(self.directory.storage, path, _LoadHistory)
                if (
                    history
                    and history.output == self.output
                    and not suspicion(_counted(self.directory, history), self.limit)
                ):
                    self.directory.storage.remove(path)
                    self._remove_failures(history.began.run if history.began else "")

    def _failure_path(self, name: str) -> str:
        return self.directory.path(FOLDER, f"{_FAILURE}{self.run}-{name}")

    def _remove_failures(self, run: str) -> None:
        folder = os.path.dirname(self.path)
        for name in self.directory.storage.list(folder) if run else ():
            if name.startswith(f"{_FAILURE}{run}-"):
                self.directory.storage.remove(os.path.join(folder, name))

    @runtime.asks_machine
    def _capture_signals(self) -> None:
        """Makes the interpreter write the numbers of signals into a file at the moment when they
        arrive. A handler in Python would run only after the current step, and a platform may kill
        the job before."""
        # not in the main thread, or not supported by the disk
        with suppress(ValueError, OSError):
            file = os.open(
                self._failure_path(_SIGNALS),
                os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC,
                0o666,
            )
            try:
                self._signals = file, runtime.set_wakeup_fd(file, warn_on_full_buffer=False)
            except ValueError:
                os.close(file)
                raise

    def _stop_capturing(self) -> None:
        if self._signals is not None:
            (file, before), self._signals = self._signals, None
            with suppress(ValueError, OSError):
                runtime.set_wakeup_fd(before)
                os.close(file)


@dataclass
class PendingLoadAttempt:
    """Holds the load attempt of a job until its first step is done or this rank fails."""

    attempt: LoadAttempt | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Ends the load attempt at the first call: a step is done, or this rank ends with
        ``error``."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            with suppress(OSError):  # the next job reads the files again
                attempt.failed(error) if error is not None else attempt.passed()


_PROGRAM_ERRORS = (
    ImportError,
    NameError,
    AttributeError,
    TypeError,
    NotImplementedError,
    SyntaxError,
)
_ERROR_PATTERNS = (
    (
        "there was no memory",
        r"out of memory|memory (is )?not enough|memory exhausted|bad_alloc|alloc\w* (\w+ )*fail|"
        r"fail\w* to alloc|\bOOM\b|EL0004|207001",
    ),
    (
        "the ranks lost each other",
        r"hccl|hcom\b|rdma|socket|\bEI\d{4}|connect|heartbeat|time[d ]*out|cluster|communicat",
    ),
    ("the data could not be read", r"data ?set|minddata|getnext|data ?queue|\btdt\b|\bmd_"),
)


def explanation(error: BaseException) -> str:
    """Returns the cause of an error; empty if the content of the checkpoint may be the cause."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "it was asked to end"
    if isinstance(error, MindResumeError):
        return "mindresume said what is wrong"
    if isinstance(error, MemoryError):
        return "there was no memory"
    if isinstance(error, OSError):
        return "a file or a connection failed"
    if isinstance(error, _PROGRAM_ERRORS):
        return "the program is wrong"
    frames = traceback.extract_tb(error.__traceback__)
    if any(
        frame.name == "compile" and f"{os.sep}mindspore{os.sep}" in frame.filename
        for frame in frames
    ):
        return "the network could not be compiled"
    return next(
        (why for why, words in _ERROR_PATTERNS if re.search(words, str(error), re.IGNORECASE)), ""
    )

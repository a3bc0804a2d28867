"""Guards against crash loops: counts the jobs that loaded a checkpoint and died before a step was done.

    {root}/.mindresume/trial-{key}                    rank 0, when all ranks have loaded it and the network is compiled
    {root}/.mindresume/death-{run}-rank_00003.json    a rank that ends with an error before its first step is done: why
    {root}/.mindresume/death-{run}-signals            rank 0: the numbers of signals, written by the kernel, see below

A platform starts a job again whenever it dies, and a checkpoint on which every job dies would be loaded for ever. So a job counts
against the checkpoint if it died between the two moments above, unless it was asked to end, or an error of one of its ranks is
explained by something else (``explanation``). After ``max_failed_loads`` such jobs in a row, of one output, the checkpoint is
suspected: it is taken only if no other can be, and retention does not remove it. The first step that a job finishes clears it.

A job that dies without an error may have been killed by the platform; it counts too, because most crashes are such. But if all
errors came from one host of several, that host is suspected first, and the checkpoint after twice as many.
"""
from __future__ import annotations

import json
import os
import re
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mindresume.errors import MindResumeError, RecordError
from mindresume.formats import Candidate
from mindresume.model.manifest import FOLDER, record_name, run_sequence
from mindresume.model.training_state import is_count
from mindresume.storage.atomic_publish import publish_json
from mindresume.storage.interface import Storage

_TRIAL, _DEATH, _SIGNALS = "trial-", "death-", "signals"
_LIMIT = 1 << 20                # bytes of a note that we read
_LONGEST = 300                  # characters of a cause
_MOST = 1000                    # deaths that are remembered
_ASKED = (signal.SIGTERM, signal.SIGINT)
SILENT = "without a word"


@dataclass(frozen=True)
class FailedLoad:
    """A job that died after it had loaded a checkpoint. It ran on ``hosts`` hosts. ``host``, ``rank``: where the error was raised
    that nothing else explains; empty and None where no rank reported one."""
    run: str
    cause: str = SILENT
    host: str = ""
    rank: int | None = None
    hosts: int = 1

    def __str__(self) -> str:
        return self.cause if self.rank is None else f"{self.cause} (rank {self.rank}, host {self.host})"


@dataclass(frozen=True)
class _Note:
    """The note on a checkpoint. ``output``: of the jobs it is about. ``deaths``: jobs that count. ``began``: the job of the last
    load attempt."""
    output: str = ""
    deaths: tuple[FailedLoad, ...] = ()
    began: FailedLoad | None = None

    @classmethod
    def read(cls, storage: Storage, path: str) -> _Note | None:
        """Reads a note. None if it has another form. Notes of earlier versions ("2 /output") counted any death and are not
        used."""
        try:
            with storage.open(path) as file:
                value = json.loads(file.read(_LIMIT))
            deaths, began = [_failed_load(row) for row in value["deaths"]], value["began"]
            return cls(str(value["output"]), tuple(deaths), _failed_load(began) if began else None)
        except (OSError, ValueError, LookupError, TypeError, RecursionError, RecordError):
            return None


def _failed_load(row: Mapping[str, Any]) -> FailedLoad:
    """Returns the FailedLoad of a JSON object. Raises RecordError, TypeError or ValueError if it is none."""
    death = FailedLoad(**row)
    run_sequence(death.run)
    texts = all(isinstance(text, str) and len(text) <= _LONGEST for text in (death.cause, death.host))
    if not texts or not is_count(death.hosts, 1) or not (death.rank is None or is_count(death.rank)):
        raise ValueError("no death")
    return death


# ---- reading -------------------------------------------------------------------------------------------------------

def key_of(candidate: Candidate) -> str:
    """Returns what identifies a candidate within its root: its folder of records, or of mindformers' the iteration folder or
    first file."""
    return candidate.name or candidate.iteration_dir or os.path.basename(candidate.first.path if candidate.first else "")


def load_attempts(storage: Storage, root: str) -> dict[str, tuple[FailedLoad, ...] | None]:
    """Returns {key: failed loads in a row} of every checkpoint with a note; None for a note that cannot be read, which does not
    count for the choice: a damaged note must not cost a checkpoint."""
    found = {}
    for name in storage.list(os.path.join(root, FOLDER)):
        if name.startswith(_TRIAL):                         # a half-written one begins with a dot
            note = _Note.read(storage, os.path.join(root, FOLDER, name))
            found[name.removeprefix(_TRIAL)] = _judged(storage, root, note) if note else None
    return found


def failed_loads_by_key(storage: Storage, root: str) -> dict[str, tuple[FailedLoad, ...]]:
    """Returns ``load_attempts`` for a choice: without those that are not known, and none where the folder of records cannot be
    listed."""
    try:
        return {key: deaths for key, deaths in load_attempts(storage, root).items() if deaths}
    except OSError:
        return {}


def suspicion(deaths: Sequence[FailedLoad], limit: int) -> str:
    """Returns why a checkpoint on which these jobs died is passed over; empty: it is not."""
    if not limit or len(deaths) < limit * (2 if one_host(deaths) else 1):
        return ""
    where = f", all on host {deaths[0].host}" if one_host(deaths) else ""
    return (f"it is suspected: {len(deaths)} jobs in a row loaded it and died before their first step was done{where}, the last "
            f"one: {deaths[-1]} (mindresume.max_failed_loads: {limit}); name it to take it all the same")


def one_host(deaths: Sequence[FailedLoad]) -> bool:
    """Returns whether one host of several may be the reason for all of them."""
    return len({death.host for death in deaths}) == 1 and all(death.host and death.hosts > 1 for death in deaths)


def warning(deaths: Sequence[FailedLoad], limit: int) -> str:
    """Returns a warning about a checkpoint that is not passed over yet; empty: none."""
    if not deaths or suspicion(deaths, limit):
        return ""
    jobs = "the job before" if len(deaths) == 1 else f"{len(deaths)} jobs in a row"
    host = f". All died on host {deaths[0].host}: look after it" if one_host(deaths) and len(deaths) > 1 else ""
    return f"{jobs} loaded it and died before the first step was done, the last one: {deaths[-1]}{host}"


def _judged(storage: Storage, root: str, note: _Note) -> tuple[FailedLoad, ...]:
    """Returns the failed loads of a note, with the job of the last load attempt: it is dead, or nobody would look. A job that is
    alive on another machine counts for now."""
    if note.began is None:
        return note.deaths
    folder, prefix = os.path.join(root, FOLDER), f"{_DEATH}{note.began.run}-"
    explained = False
    for name in storage.list(folder):
        if not name.startswith(prefix):
            continue
        try:
            with storage.open(os.path.join(folder, name)) as file:
                data = file.read(_LIMIT)
            if name == prefix + _SIGNALS:
                explained = explained or any(number in data for number in _ASKED)
                continue
            word = json.loads(data)
            if not word["explained"]:
                return (*note.deaths,
                        _failed_load({**asdict(note.began), **{key: word[key] for key in ("cause", "host", "rank")}}))
            explained = True
        except (OSError, ValueError, LookupError, TypeError, RecursionError, RecordError):
            explained = True                                # somebody said something: it did not die without a word
    return note.deaths if explained else (*note.deaths, note.began)


# ---- the job -------------------------------------------------------------------------------------------------------

class LoadAttempt:
    """The load attempt of one job; every rank has its own. ``output``: the folder it works in. ``limit``: failed loads after
    which a checkpoint is suspected, 0: it is not known. ``run``: its name. ``hosts``: number of hosts that it runs on."""

    def __init__(self, storage: Storage, root: str, candidate: Candidate, output: str, rank: int = 0, limit: int = 0):
        self.storage, self.root, self.output, self.rank, self.limit = storage, root, output, rank, limit
        self.path = os.path.join(root, FOLDER, _TRIAL + key_of(candidate))
        self.run, self.hosts, self.begun = "", 1, False
        self._signals: tuple[int, int] | None = None        # (our file, what had the numbers of signals before)

    def begin(self) -> None:
        """Records that all ranks have loaded the checkpoint, and the network is compiled: from here on it may be what the job
        dies of. Nothing is recorded in a folder that is not ours to write to. Raises OSError."""
        self.begun = True
        if self.rank == 0 and self.storage.status(os.path.dirname(self.path)) is not None:
            before = _Note.read(self.storage, self.path) or _Note()
            deaths = _judged(self.storage, self.root, before) if before.output == self.output else ()
            note = _Note(self.output, deaths[-_MOST:], FailedLoad(self.run, hosts=self.hosts))
            publish_json(self.storage, self.path, asdict(note), self.run)
            self._listen()
            self._clear(before.began.run if before.began else "")

    def passed(self) -> None:
        """Removes the notes: a step is done, so the checkpoint is not what jobs die of. Raises OSError."""
        if self.rank == 0:
            self._listen_no_more()
            self.storage.remove(self.path)
            self._clear(self.run)
            self._clear_others()

    def failed(self, error: BaseException) -> None:
        """Records why this rank ends before its first step is done. Raises OSError."""
        self._listen_no_more()
        if self.begun and self.storage.status(self.path) is not None:
            why = explanation(error)
            text = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST]
            publish_json(self.storage, self._death_path(record_name(self.rank)), {
                "cause": text, "host": socket.gethostname(), "rank": self.rank, "explained": why}, self.run)

    def _clear_others(self) -> None:
        """Removes the notes of this output on other checkpoints that are not suspected: the training goes on from this one,
        nobody will load them again, and as long as there is a note retention does not remove its checkpoint."""
        folder = os.path.dirname(self.path)
        for name in self.storage.list(folder) if self.limit else ():
            if name.startswith(_TRIAL):
                note = _Note.read(self.storage, os.path.join(folder, name))
                if note and note.output == self.output and not suspicion(_judged(self.storage, self.root, note), self.limit):
                    self.storage.remove(os.path.join(folder, name))
                    self._clear(note.began.run if note.began else "")

    def _death_path(self, name: str) -> str:
        return os.path.join(self.root, FOLDER, f"{_DEATH}{self.run}-{name}")

    def _clear(self, run: str) -> None:
        folder = os.path.dirname(self.path)
        for name in self.storage.list(folder) if run else ():
            if name.startswith(f"{_DEATH}{run}-"):
                self.storage.remove(os.path.join(folder, name))

    def _listen(self) -> None:
        """Lets the kernel write the numbers of signals into a file the moment they arrive. A handler in Python would run only
        when the step that is being computed lets it, and a platform may not wait so long before it kills."""
        with suppress(ValueError, OSError):                 # not the main thread; a disk on which that cannot be
            file = os.open(self._death_path(_SIGNALS), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC,
                           0o666)
            try:
                self._signals = file, signal.set_wakeup_fd(file, warn_on_full_buffer=False)
            except ValueError:
                os.close(file)
                raise

    def _listen_no_more(self) -> None:
        if self._signals is not None:
            (file, before), self._signals = self._signals, None
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(before)
                os.close(file)


@dataclass
class PendingLoadAttempt:
    """Holds the load attempt of the checkpoint that a job has loaded until a step of it is done, or one of its ranks fails."""
    attempt: LoadAttempt | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Ends the load attempt, if it has not ended yet: a step is done; or this rank ends with ``error``."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            with suppress(OSError):                 # the next job looks again
                attempt.failed(error) if error is not None else attempt.passed()


_PROGRAM = (ImportError, NameError, AttributeError, TypeError, NotImplementedError, SyntaxError)
_WORDS = (
    ("there was no memory", r"out of memory|memory (is )?not enough|memory exhausted|bad_alloc|alloc\w* (\w+ )*fail|"
                            r"fail\w* to alloc|\bOOM\b|EL0004|207001"),
    ("the ranks lost each other", r"hccl|hcom\b|rdma|socket|\bEI\d{4}|connect|heartbeat|time[d ]*out|cluster|communicat"),
    ("the data could not be read", r"data ?set|minddata|getnext|data ?queue|\btdt\b|\bmd_"))


def explanation(error: BaseException) -> str:
    """Returns what a job died of, if not of the numbers in a checkpoint; empty: perhaps of them."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "it was asked to end"
    if isinstance(error, MindResumeError):
        return "mindresume said what is wrong"
    if isinstance(error, MemoryError):
        return "there was no memory"
    if isinstance(error, OSError):
        return "a file or a connection failed"
    if isinstance(error, _PROGRAM):
        return "the program is wrong"
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "compile" and f"{os.sep}mindspore{os.sep}" in frame.filename for frame in frames):
        return "the network could not be compiled"
    return next((why for why, words in _WORDS if re.search(words, str(error), re.IGNORECASE)), "")

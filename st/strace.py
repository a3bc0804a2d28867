"""Runs a program under strace, parses the trace, and checks the order of the calls that touch a
folder of checkpoints.

    # Call(name="fsync", kind="fsync", path="checkpoint/rank_0", result=0 ...), in order
    calls = read_trace(text, base)
    order = Order(calls)  # follows what is flushed and what is only renamed so far
    order.broken  # every call that came too early, or must not have come at all

The rules of ``Order`` hold after every prefix, so also for a process that was killed and for one
whose calls failed.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from mindresume.fault_injection.journal import PER_EPOCH
from mindresume.formats.rank_folders import META, parse_name
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    TRASH,
    parse_attempt,
    record_rank,
    strip_trash,
)
from mindresume.storage import TEMPORARY

# kind -> system calls; "?" before a name: not on every machine
KINDS: dict[str, tuple[str, ...]] = {
    "open": ("?open", "openat", "?openat2", "?creat"),
    "write": (
        "write",
        "writev",
        "pwrite64",
        "pwritev",
        "pwritev2",
        "?copy_file_range",
        "sendfile",
        "splice",
    ),
    "fallocate": ("fallocate",),
    "fsync": ("fsync", "fdatasync"),
    "close": ("close",),
    "rename": ("?rename", "?renameat", "renameat2"),
    "mkdir": ("?mkdir", "mkdirat"),
    "unlink": ("?unlink", "unlinkat"),
    "rmdir": ("?rmdir",),
    "truncate": ("truncate", "ftruncate"),
    "link": ("?link", "linkat", "?symlink", "symlinkat"),
}
TRACED = ",".join(name for names in KINDS.values() for name in names)


def _bare(name: str) -> str:
    return name.lstrip("?")


_KIND = {_bare(name): kind for kind, names in KINDS.items() for name in names}
_BY_HANDLE = {
    name for kind in ("write", "fallocate", "fsync", "close") for name in map(_bare, KINDS[kind])
} | {"ftruncate"}
_TARGET_LAST = ("copy_file_range", "splice")
_WRITING = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)")

_WHOLE = re.compile(r"(\d+) +(\w+)\((.*)\) += (.*)")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*?) *<unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (.*)")
_HANDLE = re.compile(r"\d+<([^>]*?)(?: \(deleted\))?>")
_NAMED = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_RESULT = re.compile(
    r"(-?\d+)(?:<[^>]*>)?(?: (E[A-Z0-9]+) \([^)]*\))?(?: \((INJECTED)\))?(?: \([A-Z]+\))?"
)


@dataclass(frozen=True)
class Call:
    """``path``, ``to`` (of a rename): below the folder that was watched. ``result``: None if the
    process was killed in it. ``error``: "EIO" ... ``task``: id of the thread."""

    task: int
    name: str
    path: str
    to: str = ""
    arguments: str = ""
    result: int | None = 0
    error: str = ""
    injected: bool = False

    @property
    def kind(self) -> str:
        if self.name == "unlinkat" and "AT_REMOVEDIR" in self.arguments:
            return "rmdir"
        return _KIND[self.name]

    @property
    def writing(self) -> bool:
        """Returns whether an open is for anything but reading."""
        return self.kind == "open" and (
            self.name == "creat" or bool(_WRITING.search(self.arguments))
        )

    @property
    def changes(self) -> bool:
        """Returns whether it changes the folder, or makes a change durable."""
        return self.writing or self.kind not in ("open", "close")

    def __str__(self) -> str:
        return f"{self.name}({self.path}{' -> ' if self.to else ''}{self.to})"


def read_trace(text: str, base: str) -> list[Call]:
    """The calls that touch something below ``base``, from ``strace -f -y -s 0``. ValueError for a
    line that is not understood.

    In the order in which they began; an fsync counts from its end, when its promise is made.
    """
    found: list[tuple[int, Call]] = []
    begun: dict[int, tuple[int, str, str]] = {}
    for number, line in enumerate(text.splitlines()):
        if match := _BEGUN.fullmatch(line):
            task, name, arguments = match.groups()
            begun[int(task)] = (number, name, arguments)
        elif match := _RESUMED.fullmatch(line):
            task, name, rest, result = match.groups()
            start, name, arguments = begun.pop(int(task))
            call = _call(int(task), name, arguments + rest, result, base)
            found.append((number if call and call.kind == "fsync" else start, call))
        elif match := _WHOLE.fullmatch(line):
            task, name, arguments, result = match.groups()
            found.append((number, _call(int(task), name, arguments, result, base)))
        elif not re.fullmatch(r"\d+ +(\+\+\+|---) .*", line) and " resumed>" not in line:
            raise ValueError(f"line {number + 1} of the trace is not understood: {line}")
    found += [
        (start, _call(task, name, arguments, "?", base))
        for task, (start, name, arguments) in begun.items()
    ]
    return [call for _, call in sorted(found, key=lambda item: item[0]) if call is not None]


def _call(task: int, name: str, arguments: str, outcome: str, base: str) -> Call | None:
    """Returns None if the call touches nothing below ``base``."""
    if name not in _KIND:
        return None
    if name in _BY_HANDLE:
        paths = _HANDLE.findall(arguments)[-1 if name in _TARGET_LAST else 0 :][:1]
    else:
        paths = [os.path.join(folder, path) for folder, path in _NAMED.findall(arguments)]
    if not any((path + "/").startswith(base + "/") for path in paths):
        return None
    path, to = (*(os.path.relpath(path, base) for path in paths), "")[:2]
    if outcome.startswith("?"):
        return Call(task, name, path, to, arguments, None)
    result = _RESULT.fullmatch(outcome)
    if result is None:
        raise ValueError(f"the result of {name}({arguments}) is not understood: {outcome}")
    return Call(task, name, path, to, arguments, int(result[1]), result[2] or "", bool(result[3]))


# ---- roles of paths ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """``kind``: temporary, weights, record, manifest, meta, attempt, trash, other. ``step``: if the
    name contains it. ``trash``: it is in an attempt that is being removed."""

    kind: str
    step: int = 0
    trash: bool = False


def role(path: str) -> Role:
    parts = path.split("/")
    name = parts[-1]
    if name.endswith(TEMPORARY):
        return Role("temporary")
    if FOLDER in parts:
        below = parts[parts.index(FOLDER) + 1 :]
        parsed = parse_attempt(strip_trash(below[0])) if below else None
        if parsed is None:
            return Role("other")
        trash = below[0].startswith(TRASH)
        if len(below) == 1:
            return Role("trash" if trash else "attempt", parsed[0], trash)
        kind = (
            "manifest"
            if name == MANIFEST
            else "record"
            if record_rank(name) is not None
            else "other"
        )
        return Role(kind, parsed[0], trash)
    if name == META:
        return Role("meta")
    parsed = parse_name(name)
    return (
        Role("weights", (parsed.epoch - 1) * PER_EPOCH + parsed.step) if parsed else Role("other")
    )


# ---- the order -----------------------------------------------------------------------------------

FLUSHED, PENDING, FAILED = "durable", "not flushed", "its flush failed"


@dataclass
class Order:
    """``calls`` of one process that saves one rank. ``past``: step of the checkpoint that was
    committed before.

    ``files``: state of the bytes of half-written files. ``names``: state of every name this trace
    made; FAILED for good once the flush of its folder failed, if the file can be written anew.
    ``gone``: the same of names of weights that were removed.
    """

    calls: Iterable[Call]
    past: int | None = None
    broken: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # steps that have one under its name
        self.records: set[int] = {self.past} - {None}
        # step that meta.json was renamed for
        self.pointed = 0
        for call in self.calls:
            if call.result is not None:
                getattr(self, f"_{call.kind}")(call)

    def recorded(self, step: int) -> bool:
        return step in self.records

    def states(self, kind: str, step: int = 0) -> list[str]:
        """Returns the states of the existing names of this kind."""
        return [
            state
            for path, state in self.names.items()
            if role(path) == Role(kind, step, kind == "trash")
        ]

    def unfinished(self, steps: Iterable[int]) -> list[str]:
        """Returns what a trace without faults should have made durable by its end, and has not. The
        last of ``steps`` remains."""
        steps = list(steps)
        wanted = [
            ("meta", 0),
            *((kind, steps[-1]) for kind in ("weights", "record", "manifest", "attempt")),
        ]
        found = [
            f"{kind} of step {step}: {states or 'never appeared'}"
            for kind, step in wanted
            if (states := self.states(kind, step)) != [FLUSHED]
        ]
        found += [f"half-written: {path}" for path in self.files]
        older = [*steps[:-1], *([self.past] if self.past else [])]
        removed = [role(path).step for path, state in self.gone.items() if state == FLUSHED]
        return found + [
            f"the removal of step {step} is not durable" for step in older if step not in removed
        ]

    def _rule(self, holds: bool, call: Call, text: str) -> None:
        if not holds:
            self.broken.append(f"{call}: {text}")

    # Calls that fail have no effect, except that what a failed fsync was asked for is never sure
    # again.

    def _open(self, call: Call) -> None:
        if not call.writing:
            return
        self._rule(role(call.path).kind == "temporary", call, "a final name is opened for writing")
        if not call.error:
            self._rule(
                "O_TRUNC" in call.arguments or "O_EXCL" in call.arguments,
                call,
                "old bytes stay in the file",
            )
            self.files[call.path] = PENDING

    def _write(self, call: Call) -> None:
        self._rule(role(call.path).kind == "temporary", call, "bytes of a final name change")
        if self.files.get(call.path) == FLUSHED:
            self.files[call.path] = PENDING

    _fallocate = _truncate = _write

    def _link(self, call: Call) -> None:
        self._rule(False, call, "no links are made in a folder of checkpoints")

    def _close(self, call: Call) -> None:
        pass

    def _fsync(self, call: Call) -> None:
        state = FAILED if call.error else FLUSHED
        if call.path in self.files:
            if self.files[call.path] != FAILED:
                self.files[call.path] = state
            return
        folder = "" if call.path == "." else call.path
        for table in (self.names, self.gone):
            for path, old in table.items():
                # can not be made anew, only flushed again
                again = table is self.gone or role(path).kind in ("other", "trash")
                if os.path.dirname(path) == folder and (
                    old == PENDING or (old == FAILED and again)
                ):
                    table[path] = state

    def _mkdir(self, call: Call) -> None:
        if not call.error:
            self.names[call.path] = PENDING

    def _rename(self, call: Call) -> None:
        old, new = role(call.path), role(call.to)
        if old.kind in ("attempt", "trash"):
            self._rename_attempt(call, old, new)
            return
        self._rule(
            old.kind == "temporary" and new.kind not in ("temporary", "other"),
            call,
            "not a temporary name to a final",
        )
        self._rule(
            os.path.dirname(call.path) == os.path.dirname(call.to), call, "into another folder"
        )
        self._rule(
            self.files.get(call.path) == FLUSHED,
            call,
            f"before its bytes are safe: {self.files.get(call.path)}",
        )
        if new.kind == "weights":
            self._rule(
                call.to not in self.names and new.step not in self.records,
                call,
                "over a file of weights",
            )
        elif new.kind == "record":
            self._needs(call, "weights", new.step)
            self._needs(call, "attempt", new.step)
            for path, state in self.names.items():
                self._rule(
                    role(path).kind != "other" or state == FLUSHED,
                    call,
                    f"before the folder {path} is durable: {state}",
                )
        elif new.kind == "manifest":
            self._needs(call, "record", new.step)
        elif new.kind == "meta":
            newest = max(
                (role(path).step for path in self.names if role(path).kind == "manifest"), default=0
            )
            self._needs(call, "manifest", newest)
            self.pointed = self.pointed if call.error else newest
        if not call.error:
            self.files.pop(call.path, None)
            self.names[call.to] = PENDING
            self.records |= {new.step} if new.kind == "record" else set()

    def _needs(self, call: Call, kind: str, step: int) -> None:
        states = self.states(kind, step)
        self._rule(
            states == [FLUSHED] or step == self.past,
            call,
            f"before the {kind} of step {step} is durable: {states or 'not there'}",
        )

    def _rename_attempt(self, call: Call, old: Role, new: Role) -> None:
        """A checkpoint is un-committed, or was held after all and comes back."""
        self._rule(
            (old.kind, new.kind, old.step)
            in (("attempt", "trash", new.step), ("trash", "attempt", new.step)),
            call,
            "an attempt gets another name than its own",
        )
        if new.kind == "trash":
            newer = [
                state
                for path, state in self.names.items()
                if role(path).kind == "manifest" and role(path).step > old.step
            ]
            self._rule(FLUSHED in newer, call, "before a newer checkpoint is durable")
            self._rule(
                self.pointed > old.step and self.states("meta") == [FLUSHED],
                call,
                "before meta.json leads elsewhere",
            )
        if not call.error:
            inside = [path for path in self.names if (path + "/").startswith(call.path + "/")]
            for path in inside:
                self.names[call.to + path[len(call.path) :]] = self.names.pop(path)
            self.names[call.to] = PENDING
            self.records = (
                self.records - {old.step} if new.kind == "trash" else self.records | {old.step}
            )

    def _unlink(self, call: Call) -> None:
        what = role(call.path)
        self._rule(what.kind not in ("meta",), call, "a pointer is removed")
        if what.kind == "weights":
            self._rule(
                what.step not in self.records, call, "weights of a checkpoint that has its record"
            )
            self._rule(
                self.states("trash", what.step) in ([], [FLUSHED]),
                call,
                "before un-committing is durable",
            )
        elif what.kind in ("record", "manifest") and what.trash:
            lost = [state for path, state in self.gone.items() if role(path).step == what.step]
            self._rule(
                lost == [FLUSHED],
                call,
                f"before the names of its weights are gone for good: {lost}",
            )
        elif what.kind == "record":
            self._rule(
                not self.states("manifest", what.step), call, "the record of a committed checkpoint"
            )
        else:
            self._rule(
                what.kind in ("temporary", "attempt", "trash"),
                call,
                "a file that is none of ours, or committed",
            )
        if not call.error:
            self.files.pop(call.path, None)
            self.names.pop(call.path, None)
            if what.kind == "weights":
                self.gone[call.path] = PENDING
            if what.kind == "record" and not what.trash:
                self.records.discard(what.step)

    def _rmdir(self, call: Call) -> None:
        # it is made anew, and then flushed, or not used
        unsure = self.names.get(call.path) in (PENDING, FAILED)
        self._rule(
            role(call.path).kind == "trash" or unsure, call, "a folder that is not being removed"
        )
        if not call.error:
            self.names.pop(call.path, None)

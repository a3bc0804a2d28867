"""Names and scan of Checkpoint 1.0: one folder per rank, one weight file per step, ``meta.json``
beside it.

    {root}/rank_{R}/{prefix}_rank_{R}[_{n}]-{epoch}_{step in epoch}.{ckpt|safetensors}
    {root}/rank_{R}/meta.json            {"last_epoch", "last_step", "last_ckpt_file"}: a hint,
                                         written by rank 0 after a commit
                                         {root}/.mindresume/step-...-run-.../ records of all ranks
                                         and the manifest (``mindresume.formats.records``)

Names are for people and for mindformers; the records or the content of a file tell what it is.
Names and ``meta.json`` follow document 001 and mindformers ``core/callback/callback.py``
(CheckpointMonitor), ``tools/resume_ckpt.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from mindresume.errors import CorruptFileError
from mindresume.formats import (
    MINDFORMERS,
    OURS,
    Candidate,
    CheckpointDir,
    Refusal,
    unlisted_candidate,
)
from mindresume.formats.records import Attempt, attempt_at, scan_records
from mindresume.formats.weight_files import existing, header_of, no_step, scalars_of
from mindresume.model.layout import MAX_RANKS
from mindresume.model.manifest import (
    FOLDER,
    FORMATS,
    RUN,
    FileRecord,
    attempt_name,
    attempts,
    run_sequence,
    strip_trash,
)
from mindresume.storage import parallel, read_json
from mindresume.tensor_files.header import Header
from mindresume.typed import is_count

META = "meta.json"
# key in the metadata of weight files that mindresume writes: "<run> <step>"
LABEL = "mindresume"
_NAME = re.compile(
    r"(?P<prefix>.+)_rank_(?P<rank>\d+)(?:_(?P<suffix>\d+))?-(?P<epoch>\d+)_(?P<step>\d+)"
    r"\.(?P<format>ckpt|safetensors)"
)
_FOLDER = re.compile(r"rank_(\d+)")
_LABEL = re.compile(rf"({RUN}) ([0-9]{{1,18}})")
_META_LIMIT = 1 << 16  # bytes
_STRATEGY = re.compile(r".*_rank_(\d+)\.(?:ckpt|json)")


# ---- names ---------------------------------------------------------------------------------------


class FileName(NamedTuple):
    """The parts of a weight file's name. ``suffix``: 0 for none; it increases when files with the
    same prefix exist (document 001)."""

    prefix: str
    rank: int
    suffix: int
    epoch: int
    step: int
    format: str

    def __str__(self) -> str:
        return f"{stem(self.prefix, self.rank, self.suffix)}-{self.epoch}_{self.step}.{self.format}"


def parse_name(name: str) -> FileName | None:
    """Parses the name of a weight file; returns None for a name of another form."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return FileName(
        found["prefix"],
        int(found["rank"]),
        int(found["suffix"] or 0),
        int(found["epoch"]),
        int(found["step"]),
        found["format"],
    )


def stem(prefix: str, rank: int, suffix: int) -> str:
    """Returns ``{prefix}_rank_{R}[_{n}]``, which the documents of mindformers call the prefix,
    including the rank."""
    return f"{prefix}_rank_{rank}" + (f"_{suffix}" if suffix else "")


def folder_name(rank: int) -> str:
    """Returns the name of the folder of ``rank``."""
    return f"rank_{rank}"


def root_of(path: str) -> str:
    """Returns the folder that a rank folder lies in; another path as it is."""
    is_rank_folder = folder_rank(os.path.basename(path)) is not None
    return os.path.dirname(os.path.abspath(path)) if is_rank_folder else path


def folder_rank(name: str) -> int | None:
    """Returns the rank of a rank folder; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found.group(1)) if found else None


def free_suffix(names: Iterable[str], prefix: str, rank: int) -> int:
    """Returns the smallest suffix larger than all in use for ``prefix``; 0 if no file has that
    prefix."""
    used = [
        parsed.suffix
        for parsed in map(parse_name, names)
        if parsed and (parsed.prefix, parsed.rank) == (prefix, rank)
    ]
    return max(used) + 1 if used else 0


def name_for_rank(name: str, rank: int, fmt: str) -> str:
    """Returns the file that ``resume_training: name`` means on ``rank``: completes the extension
    and replaces the rank id (document 001)."""
    if not name.endswith(tuple(f".{known}" for known in FORMATS)):
        name = f"{name}.{fmt}"
    head, dash, tail = name.rpartition("-")
    if not dash:
        return name
    return (
        re.sub(r"_rank_\d+(_\d+)?$", lambda found: f"_rank_{rank}{found.group(1) or ''}", head)
        + "-"
        + tail
    )


def meta_json(name: FileName) -> dict[str, object]:
    """Returns the content of ``meta.json`` after the commit of this file (mindformers
    callback.py:record_last_ckpt_to_json)."""
    return {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}


def label(run: str, step: int) -> dict[str, str]:
    """Returns the metadata of a weight file of mindresume. It distinguishes the file from those of
    mindformers and of other runs, even if the records are gone."""
    return {LABEL: f"{run} {step}"}


def parse_label(header: Header) -> tuple[str, int] | None:
    """Returns the (run, step) in a file's label; None without a label, or for one that mindresume
    cannot have written."""
    found = _LABEL.fullmatch(header.metadata.get(LABEL, ""))
    return (found[1], int(found[2])) if found else None


# ---- scan ----------------------------------------------------------------------------------------


def scan_rank_folders(
    directory: CheckpointDir,
    top: list[str],
    attempted: list[str] | None,
    ours: list[Candidate],
    known: set[str],
) -> tuple[list[Candidate], list[str]]:
    """Finds everything in the rank folders that looks like a saved step. Returns candidates, newest
    first, and notes.

    Reads names, and one header per group of files without records; sizes and contents are checked
    later, only for the candidates that matter. If a committed checkpoint exists, the rank folders
    are listed only if the first one holds files without records: mindformers saves into all of
    them. Else the number of operations would grow with the ranks.

    Args:
        directory: the checkpoint directory.
        top: names in ``root``.
        attempted: names in its folder of records; None if that cannot be listed.
        ours: candidates with records.
        known: the files that those candidates name.
    """
    ranks, committed = ranks_of(top), any(candidate.committed for candidate in ours)
    folders = _RankFolders(directory, known, attempted)
    foreign, notes = folders.look(ranks[:1] if committed else ranks)
    if committed and (foreign or folders.hidden):
        foreign, notes = folders.look(ranks)
    if folders.late:
        seen, _, more = scan_records(directory, folders.late.values(), brief=True)
        ours, notes = ours + seen, notes + more
    if foreign:
        foreign, more = _order_foreign(directory, ours, foreign)
        notes += more
    found = sorted(ours + foreign, key=attrgetter("order"), reverse=True)
    return [folders.hidden[rank] for rank in sorted(folders.hidden)] + found, notes


def ranks_of(top: Iterable[str]) -> list[int]:
    """Returns the ranks that have a folder, ascending."""
    return sorted(rank for rank in map(folder_rank, top) if rank is not None)


def expected_ranks(directory: CheckpointDir, top: list[str]) -> tuple[int | None, str]:
    """Estimates the number of ranks of a job that left no manifest. Returns it and the source of
    the estimate."""
    count, source = len(ranks_of(top)), "the number of rank folders"
    folder = os.path.join(os.path.dirname(os.path.abspath(directory.root)), "strategy")
    try:
        found = [
            int(match.group(1))
            for match in map(_STRATEGY.fullmatch, directory.storage.list(folder))
            if match
        ]
    except OSError as error:
        found, source = [], f"{source} ({folder} cannot be listed: {error.strerror or error})"
    found = [rank for rank in found if rank < MAX_RANKS]
    if found:
        return max(found) + 1, "the strategy folder beside"
    return (count, source) if count else (None, "")


@dataclass
class _Group:
    """The files of one save without records, by rank, grouped by their names."""

    format: str
    epoch: int | None
    files: dict[int, str] = field(default_factory=dict)


@dataclass
class _RankFolders:
    """What is seen in rank folders.

    Attributes:
        directory: the checkpoint directory.
        known: files that a candidate with records names.
        attempted: names in the folder of records; None if that cannot be listed.
        hidden: by rank, the refused candidate for a folder that cannot be listed.
        late: by (run, step), folders of records that exist but were not listed: another host has
            just made them.
    """

    directory: CheckpointDir
    known: set[str]
    attempted: list[str] | None
    hidden: dict[int, Candidate] = field(default_factory=dict)
    late: dict[tuple[str, int], Attempt] = field(default_factory=dict)

    def look(self, ranks: list[int]) -> tuple[list[Candidate], list[str]]:
        """Returns candidates among the files of ``ranks`` that no record names, and notes."""
        rows = parallel(self.directory.storage, self._listed, ranks)
        listings = {rank: names for rank, (names, _) in zip(ranks, rows, strict=True)}
        notes = [
            f"{folder_name(rank)}/{META} {problem}; ignored, the files decide"
            for rank, (_, problem) in zip(ranks, rows, strict=True)
            if problem
        ]
        groups: dict[tuple[str, str], _Group] = {}
        for rank, names in listings.items():
            for name in names:
                fmt = next((fmt for fmt in FORMATS if name.endswith(f".{fmt}")), None)
                path = f"{folder_name(rank)}/{name}"
                if fmt is None or name.startswith(".") or path in self.known:
                    continue
                if name.endswith("_breakpoint.ckpt"):
                    notes.append(
                        f"{path}: written by MindSpore's exception_save, whose step_num counts "
                        "from the beginning of the epoch; ignored"
                    )
                    continue
                parsed = parse_name(name)
                if parsed and parsed.rank != rank:
                    notes.append(
                        f"{path}: a file of rank {parsed.rank} in the folder of rank {rank}; "
                        "ignored"
                    )
                    continue
                template = str(parsed._replace(rank=0)) if parsed else _template(name, rank)
                group = groups.setdefault(
                    (template, fmt), _Group(fmt, parsed.epoch if parsed else None)
                )
                group.files[rank] = path
        # The (run, step) of every attempt that has a folder, including those being removed.
        tried = {
            (run, step)
            for _, step, run in attempts(
                list(map(strip_trash, (self.attempted or []) if groups else []))
            )
        }
        found = [self._candidate(group, tried) for group in groups.values()]
        return [candidate for candidate in found if candidate is not None], notes

    def _listed(self, rank: int) -> tuple[list[str], str]:
        """Returns the names in the folder of a rank, and what is wrong with its ``meta.json``,
        which is only a hint; empty: nothing."""
        folder = self.directory.path(folder_name(rank))
        try:
            names = self.directory.storage.list(folder)
        except OSError as error:
            self.hidden[rank] = unlisted_candidate(error, folder_name(rank), rank)
            return [], ""
        if META not in names:
            return names, ""
        path = os.path.join(folder, META)
        try:
            last = str(read_json(self.directory.storage, path, _META_LIMIT)["last_ckpt_file"])
        except (OSError, ValueError, KeyError, TypeError):
            return names, "is empty or truncated"
        return names, "" if last in names else f"names {last}, which is not there"

    def _candidate(self, group: _Group, tried: set[tuple[str, int]]) -> Candidate | None:
        """Returns the candidate of a group of files; None if its records make it one. ``tried``:
        (run, step) of folders of records."""
        files = {
            rank: (FileRecord(path, group.format),) for rank, path in sorted(group.files.items())
        }
        base = Candidate(None, MINDFORMERS, group.format, files, len(files), epoch=group.epoch)
        header = None
        problem = None
        scalars = {}
        for rank, (file,) in files.items():
            try:
                header = header_of(self.directory, file)
                scalars = scalars_of(self.directory, file, header)
                break
            except CorruptFileError as error:
                problem = problem or Refusal(None, error.reason, file.path, rank)
        else:
            return replace(base, problem=problem)
        path = files[min(files)][0].path
        written = parse_label(header)
        if written is not None:
            run, saved = written
            ours = replace(
                base, step=saved, origin=OURS, run=run, order=(run_sequence(run), saved, 0.0)
            )
            if self.attempted is None:
                return replace(
                    ours,
                    problem=Refusal(
                        saved, f"its records are unknown, as {FOLDER} cannot be listed", path
                    ),
                )
            # Its folder of records is a candidate already, is being removed, or has just been made.
            if written in tried or written in self.late or self._is_late(run, saved):
                return None
            # A run without any records here was copied without them. Only for the others a missing
            # record proves an incomplete save.
            if any(other == run for other, _ in tried):
                return replace(
                    ours,
                    maybe_completed=False,
                    problem=Refusal(
                        saved, "the save never completed: no record of it was written", path
                    ),
                )
        step = scalars.get("step_num")
        if not is_count(step):
            return replace(base, problem=no_step(path))
        samples, epoch = scalars.get("global_batch_size"), scalars.get("epoch_num")
        position = float(step * samples) if is_count(samples) else float(step)
        return replace(
            base,
            step=step,
            order=(0.0, position, 0.0),
            epoch=epoch if is_count(epoch) else group.epoch,
        )

    def _is_late(self, run: str, step: int) -> bool:
        """Returns whether a folder of records exists although it was not listed; if so, keeps it in
        ``late``."""
        name = attempt_name(step, run)
        path = os.path.join(FOLDER, name)
        try:
            if self.directory.storage.status(self.directory.path(path)) is None:
                return False
            self.late[run, step] = attempt_at(self.directory, name, step, run)
        except OSError as error:
            self.late[run, step] = Attempt(name, step, run, "", path, [], error)
        return True


def _template(name: str, rank: int) -> str:
    """Returns ``name`` with the last occurrence of its rank number replaced, preferably the one
    after ``_rank_``. A prefix may contain the same number (``llama2_7b_2.ckpt``), and so may epoch
    and step (``net_rank_1-network-1_5.safetensors``)."""
    number = rf"(?<=_rank_){rank}(?!\d)"
    if not re.search(number, name):
        number = rf"(?<!\d){rank}(?!\d)"
    return re.sub(rf"{number}(?!.*{number})", "{rank}", name)


def _order_foreign(
    directory: CheckpointDir, ours: list[Candidate], foreign: list[Candidate]
) -> tuple[list[Candidate], list[str]]:
    """Orders saves of mindformers, without clocks where the names allow it. A run takes a suffix
    larger than any in use for its prefix, so for equal prefixes the larger suffix is the later run,
    of mindformers or of mindresume; within a run, samples seen decide. Only prefixes that cannot be
    compared are ordered by the times of their files, which copying loses; a note then says so."""
    there = [candidate for candidate in ours if candidate.maybe_completed]
    newest_of_ours = max((candidate.saved_at or 0.0 for candidate in there), default=0.0)
    numbers = [(*_generation(candidate), candidate.order[0]) for candidate in there]
    theirs = [candidate for candidate in foreign if candidate.origin == MINDFORMERS]
    times = [
        max((status.mtime for status in existing(directory, candidate.all_files)), default=0.0)
        for candidate in theirs
    ]
    generations = [
        (*_generation(candidate), time) for candidate, time in zip(theirs, times, strict=True)
    ]
    prefixes, known = {prefix for prefix, _, _ in generations}, {prefix for prefix, _, _ in numbers}
    later = {prefix for prefix, _, at in generations if there and at > newest_of_ours}
    placed = [candidate for candidate in foreign if candidate.origin != MINDFORMERS]
    for candidate, (prefix, suffix, time) in zip(theirs, generations, strict=True):
        before = [
            (number, used) for name, used, number in numbers if name == prefix and used <= suffix
        ]
        number, used = max(before, default=(0.0, suffix))
        # an emergency save of mindformers within a run of mindresume
        if before and used == suffix:
            placed.append(
                replace(candidate, order=(number, candidate.step or 0, time), saved_at=time)
            )
            continue
        generation = number + 0.5 if before else float("inf") if prefix in later - known else 0.0
        begun = (
            max(at for name, used, at in generations if name == prefix and used <= suffix)
            if len(prefixes) > 1
            else 0.0
        )
        position = candidate.order[1] if len(candidate.order) > 1 else -1.0
        placed.append(
            replace(candidate, order=(generation, begun, suffix, position, time), saved_at=time)
        )
    if len(prefixes) < 2 and (not known or prefixes <= known):
        return placed, []
    names = [
        repr(prefix) if prefix else "names of another form" for prefix in sorted(prefixes | known)
    ]
    return placed, [
        f"the names of {', '.join(names)} have no common prefix: they are ordered by the times of "
        "their files, which copying loses"
    ]


def _generation(candidate: Candidate) -> tuple[str, int]:
    """Returns (prefix, suffix) of the names of a candidate's files; ("", 0) for names of another
    form."""
    parsed = parse_name(os.path.basename(candidate.first.path)) if candidate.first else None
    return (parsed.prefix, parsed.suffix) if parsed else ("", 0)


def labelled_files(directory: CheckpointDir, run: str, step: int) -> list[str]:
    """Returns the paths of all ranks' files whose label has this run and step, for clean-up. Lists
    every rank folder. Files whose names differ only in the rank belong to one save: the header of
    one readable file is read for each such name, and those of the others only if that one
    matches."""
    folders = [
        name for name in directory.storage.list(directory.root) if folder_rank(name) is not None
    ]
    listings = parallel(directory.storage, directory.storage.list, map(directory.path, folders))
    groups: dict[FileName, list[FileRecord]] = {}
    for folder, names in zip(folders, listings, strict=True):
        for name in names:
            parsed = parse_name(name)
            if parsed is not None:
                groups.setdefault(parsed._replace(rank=0), []).append(
                    FileRecord(f"{folder}/{name}", parsed.format)
                )
    label_of = partial(_label_of, directory)
    found = []
    for files in groups.values():
        if next((label for label in map(label_of, files) if label is not False), None) == (
            run,
            step,
        ):
            labels = parallel(directory.storage, label_of, files)
            found += [
                directory.path(file.path)
                for file, label in zip(files, labels, strict=True)
                if label == (run, step)
            ]
    return found


def _label_of(directory: CheckpointDir, file: FileRecord) -> tuple[str, int] | None | bool:
    """Returns the label of a file; False if it cannot be read."""
    try:
        return parse_label(header_of(directory, file))
    except CorruptFileError:
        return False

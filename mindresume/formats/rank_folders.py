"""Names and scan of Checkpoint 1.0: one folder per rank, one weight file per step, ``meta.json`` beside it.

    {root}/rank_{R}/{prefix}_rank_{R}[_{n}]-{epoch}_{step in epoch}.{ckpt|safetensors}
    {root}/rank_{R}/meta.json            {"last_epoch", "last_step", "last_ckpt_file"}: a hint, written by rank 0 after a commit
    {root}/.mindresume/step-...-run-.../ records of all ranks and the manifest (``mindresume.formats.records``)

Names are for people and for mindformers; the records or the content of a file tell what it is. Names and ``meta.json`` follow
document 001 and mindformers ``core/callback/callback.py`` (CheckpointMonitor), ``tools/resume_ckpt.py``.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindresume.errors import CorruptFileError
from mindresume.formats import MINDFORMERS, OURS, Candidate, CheckpointDir, Refusal, unlisted_candidate
from mindresume.formats.records import Attempt, read_attempts
from mindresume.formats.weight_files import header_of, no_step, scalars_of, status_of
from mindresume.model.layout import MAX_RANKS
from mindresume.model.manifest import FOLDER, FORMATS, FileRecord, attempt_name, attempts, is_run, run_sequence, strip_trash
from mindresume.model.training_state import is_count
from mindresume.storage.operations import parallel, read_json
from mindresume.tensor_files import Header

META = "meta.json"
LABEL = "mindresume"                   # key in the metadata of weight files that mindresume writes: "<run> <step>"
_NAME = re.compile(r"(?P<prefix>.+)_rank_(?P<rank>\d+)(?:_(?P<suffix>\d+))?-(?P<epoch>\d+)_(?P<step>\d+)"
                   r"\.(?P<format>ckpt|safetensors)")
_FOLDER = re.compile(r"rank_(\d+)")
_LABEL = re.compile(r"([^ ]+) ([0-9]{1,18})")
_META_LIMIT = 1 << 16       # bytes
_STRATEGY = re.compile(r".*_rank_(\d+)\.(?:ckpt|json)")


# ---- names ----------------------------------------------------------------------------------------------------------

class FileName(NamedTuple):
    """The parts of a weight file's name. ``suffix``: 0 for none; it increases when files with the same prefix exist (document
    001)."""
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
    return FileName(found["prefix"], int(found["rank"]), int(found["suffix"] or 0), int(found["epoch"]),
                    int(found["step"]), found["format"])


def stem(prefix: str, rank: int, suffix: int) -> str:
    """Returns ``{prefix}_rank_{R}[_{n}]``, which the documents of mindformers call the prefix, including the rank."""
    return f"{prefix}_rank_{rank}" + (f"_{suffix}" if suffix else "")


def folder_name(rank: int) -> str:
    """Returns the name of the folder of ``rank``."""
    return f"rank_{rank}"


def folder_rank(name: str) -> int | None:
    """Returns the rank of a rank folder; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found.group(1)) if found else None


def free_suffix(names: Iterable[str], prefix: str, rank: int) -> int:
    """Returns the smallest suffix larger than all in use for ``prefix``; 0 if no file has that prefix."""
    used = [parsed.suffix for parsed in map(parse_name, names) if parsed and (parsed.prefix, parsed.rank) == (prefix, rank)]
    return max(used) + 1 if used else 0


def name_for_rank(name: str, rank: int, fmt: str) -> str:
    """Returns the file that ``resume_training: name`` means on ``rank``: completes the extension and replaces the rank id
    (document 001)."""
    if not name.endswith(tuple(f".{known}" for known in FORMATS)):
        name = f"{name}.{fmt}"
    head, dash, tail = name.rpartition("-")
    if not dash:
        return name
    return re.sub(r"_rank_\d+(_\d+)?$", lambda found: f"_rank_{rank}{found.group(1) or ''}", head) + "-" + tail


def meta_json(name: FileName) -> dict[str, object]:
    """Returns the content of ``meta.json`` after the commit of this file (mindformers callback.py:record_last_ckpt_to_json)."""
    return {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}


def label(run: str, step: int) -> dict[str, str]:
    """Returns the metadata of a weight file of mindresume. It distinguishes the file from those of mindformers and of other runs,
    even if the records are gone."""
    return {LABEL: f"{run} {step}"}


def parse_label(header: Header) -> tuple[str, int] | None:
    """Returns the (run, step) in a file's label; None without a label, or for one that mindresume cannot have written."""
    found = _LABEL.fullmatch(header.metadata.get(LABEL, ""))
    return (found[1], int(found[2])) if found and is_run(found[1]) else None


# ---- scan -----------------------------------------------------------------------------------------------------------

def scan_rank_folders(directory: CheckpointDir, top: list[str], attempted: list[str] | None, ours: list[Candidate],
                      known: set[str]) -> tuple[list[Candidate], list[str]]:
    """Finds everything in the rank folders that looks like a saved step. Returns candidates, newest first, and notes.

    Reads names, and one header per group of files without records; sizes and contents are checked later, only for the candidates
    that matter. If a committed checkpoint exists, the rank folders are listed only if the first one holds files without records:
    mindformers saves into all of them. Else the number of operations would grow with the ranks.

    Args:
        directory: the checkpoint directory.
        top: names in ``root``.
        attempted: names in its folder of records; None if that cannot be listed.
        ours: candidates with records.
        known: the files that those candidates name.
    """
    ranks, tried = ranks_of(top), None if attempted is None else _attempted(attempted)
    late: dict[tuple[str, int], Attempt] = {}
    hidden: dict[int, Candidate] = {}

    def names_of(rank: int) -> list[str]:
        try:
            return directory.storage.list(directory.path(folder_name(rank)))
        except OSError as error:
            hidden[rank] = unlisted_candidate(error, folder_name(rank), rank)
            return []

    def look(ranks: list[int]) -> tuple[list[Candidate], list[str]]:
        return _scan_names(directory, dict(zip(ranks, parallel(directory.storage, names_of, ranks), strict=True)), known, tried,
                           late)
    committed = any(candidate.committed for candidate in ours)
    foreign, notes = look(ranks[:1] if committed else ranks)
    if committed and (foreign or hidden):
        foreign, notes = look(ranks)
    if late:
        seen, _, said = read_attempts(directory, list(late.values()), brief=True)
        ours, notes = ours + seen, notes + said
    placed, more = _order_foreign(directory, ours, foreign)
    found = sorted(ours + placed, key=lambda c: c.order, reverse=True)
    return [hidden[rank] for rank in sorted(hidden)] + found, notes + more


def ranks_of(top: Iterable[str]) -> list[int]:
    """Returns the ranks that have a folder, ascending."""
    return sorted(rank for rank in map(folder_rank, top) if rank is not None)


def expected_ranks(directory: CheckpointDir, top: list[str]) -> tuple[int | None, str]:
    """Estimates the number of ranks of a job that left no manifest. Returns it and the source of the estimate."""
    ranks = ranks_of(top)
    folder = os.path.join(os.path.dirname(os.path.abspath(directory.root)), "strategy")
    try:
        names = directory.storage.list(folder)
    except OSError as error:
        return (len(ranks), f"the number of rank folders ({folder} cannot be listed: {error.strerror or error})") if ranks else (
            None, "")
    found = [int(match.group(1)) for match in map(_STRATEGY.fullmatch, names) if match]
    found = [rank for rank in found if rank < MAX_RANKS]
    if found:
        return max(found) + 1, "the strategy folder beside"
    return (len(ranks), "the number of rank folders") if ranks else (None, "")


def _attempted(names: list[str]) -> set[tuple[str, int]]:
    """Returns (run, step) of every attempt that has a folder, including those being removed. ``names``: names in the folder of
    records."""
    return {(run, step) for _, step, run in attempts(list(map(strip_trash, names)))}


# ---- files without records -----------------------------------------------------------------------------------------

@dataclass
class _Group:
    """The files of one save, by rank, grouped by their names."""
    template: str
    format: str
    files: dict[int, str]
    epoch: int | None


def _scan_names(directory: CheckpointDir, listings: Mapping[int, list[str]], known: set[str],
                attempted: set[tuple[str, int]] | None, late: dict[tuple[str, int], Attempt]
                ) -> tuple[list[Candidate], list[str]]:
    """Returns candidates among files that no record names, and notes. ``late``: as for ``_from_group``."""
    groups: dict[tuple[str, str], _Group] = {}
    hinted = [rank for rank, names in listings.items() if META in names]
    notes = sum(parallel(directory.storage, lambda rank: _check_meta(directory, folder_name(rank), listings[rank]), hinted), [])
    for rank, names in listings.items():
        folder = folder_name(rank)
        for name in names:
            fmt = next((fmt for fmt in FORMATS if name.endswith(f".{fmt}")), None)
            path = f"{folder}/{name}"
            if fmt is None or name.startswith(".") or path in known:
                continue
            if name.endswith("_breakpoint.ckpt"):
                notes.append(f"{path}: written by MindSpore's exception_save, whose step_num counts from the beginning of the "
                             f"epoch; ignored")
                continue
            parsed = parse_name(name)
            if parsed and parsed.rank != rank:
                notes.append(f"{path}: a file of rank {parsed.rank} in the folder of rank {rank}; ignored")
                continue
            template = str(parsed._replace(rank=0)) if parsed else _template(name, rank)
            group = groups.setdefault((template, fmt), _Group(template, fmt, {}, parsed.epoch if parsed else None))
            group.files[rank] = path
    candidates = []
    for group in groups.values():
        candidate = _from_group(directory, group, attempted, late)
        if candidate is not None:
            candidates.append(candidate)
    return candidates, notes


def _template(name: str, rank: int) -> str:
    """Returns ``name`` with the last occurrence of its rank number replaced, preferably the one after ``_rank_``. A prefix may
    contain the same number (``llama2_7b_2.ckpt``), and so may epoch and step (``net_rank_1-network-1_5.safetensors``)."""
    number = rf"(?<=_rank_){rank}(?!\d)"
    if not re.search(number, name):
        number = rf"(?<!\d){rank}(?!\d)"
    return re.sub(rf"{number}(?!.*{number})", "{rank}", name)


def _check_meta(directory: CheckpointDir, folder: str, names: list[str]) -> list[str]:
    """Returns notes about a wrong ``meta.json``, which is ignored, as it is only a hint."""
    path = directory.path(folder, META)
    try:
        last = read_json(directory.storage, path, _META_LIMIT)["last_ckpt_file"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{folder}/{META} is empty or truncated; ignored, the files decide"]
    if last not in names:
        return [f"{folder}/{META} names {last}, which is not there; ignored, the files decide"]
    return []


def _from_group(directory: CheckpointDir, group: _Group, attempted: set[tuple[str, int]] | None,
                late: dict[tuple[str, int], Attempt]) -> Candidate | None:
    """Returns the candidate of a group of files; None if its records make it one. Adds to ``late`` folders of records that
    exist but were not listed: another host has just made them."""
    files = {rank: (FileRecord(path, group.format),) for rank, path in sorted(group.files.items())}
    base = Candidate(None, MINDFORMERS, group.format, files, len(files), epoch=group.epoch)
    header, problem, scalars = None, None, {}
    for rank, (file,) in files.items():
        try:
            header = header_of(directory, file)
            scalars = scalars_of(directory, file, header)
            break
        except CorruptFileError as error:
            problem = problem or Refusal(None, error.reason, file.path, rank)
        except OSError as error:
            problem = problem or Refusal(None, f"cannot be read: {error.strerror or error}", file.path, rank)
    else:
        return replace(base, problem=problem)
    path = files[min(files)][0].path
    written = parse_label(header)
    if written is not None:
        run, saved = written
        ours = replace(base, step=saved, origin=OURS, run=run, order=(run_sequence(run), saved, 0.0))
        if attempted is None:
            return replace(ours, problem=Refusal(saved, f"its records are unknown, as {FOLDER} cannot be listed", path))
        # Its folder of records is a candidate already, is being removed, or has just been made.
        if written in attempted or written in late or _is_late(directory, written, late):
            return None
        # A run without any records here was copied without them. Only for the others a missing record proves an incomplete save.
        if any(other == run for other, _ in attempted):
            return replace(ours, maybe_completed=False,
                           problem=Refusal(saved, "the save never completed: no record of it was written", path))
    step = scalars.get("step_num")
    if not is_count(step):
        return replace(base, problem=no_step(path))
    samples, epoch = scalars.get("global_batch_size"), scalars.get("epoch_num")
    position = float(step * samples) if is_count(samples) else float(step)
    return replace(base, step=step, order=(0.0, position, 0.0), epoch=epoch if is_count(epoch) else group.epoch)


def _is_late(directory: CheckpointDir, written: tuple[str, int], late: dict[tuple[str, int], Attempt]) -> bool:
    """Returns whether a folder of records of ``written`` (run, step) exists although it was not listed; if so, adds it to
    ``late``."""
    run, step = written
    name = attempt_name(step, run)
    path = directory.path(FOLDER, name)
    try:
        if directory.storage.status(path) is None:
            return False
        late[written] = Attempt(name, step, run, "", directory.storage.list(path))
    except OSError as error:
        late[written] = Attempt(name, step, run, "", [], error)
    return True


def _order_foreign(directory: CheckpointDir, ours: list[Candidate], foreign: list[Candidate]
                   ) -> tuple[list[Candidate], list[str]]:
    """Orders saves of mindformers, without clocks where the names allow it. A run takes a suffix larger than any in use for its
    prefix, so for equal prefixes the larger suffix is the later run, of mindformers or of mindresume; within a run, samples seen
    decide. Only prefixes that cannot be compared are ordered by the times of their files, which copying loses; a note then says
    so."""
    def mtime(candidate: Candidate) -> float:
        found = parallel(directory.storage, lambda file: status_of(directory, file), candidate.all_files)
        return max((status.mtime for status in found if status), default=0.0)

    there = [candidate for candidate in ours if candidate.maybe_completed]
    newest_of_ours = max((candidate.saved_at or 0.0 for candidate in there), default=0.0)
    numbers = [(*_generation(candidate), candidate.order[0]) for candidate in there]
    times = {id(candidate): mtime(candidate) for candidate in foreign if candidate.origin == MINDFORMERS}
    generations = [(*_generation(candidate), times[id(candidate)]) for candidate in foreign if candidate.origin == MINDFORMERS]
    prefixes, known = {prefix for prefix, _, _ in generations}, {prefix for prefix, _, _ in numbers}
    later = {prefix for prefix, _, at in generations if there and at > newest_of_ours}
    placed = []
    for candidate in foreign:
        if candidate.origin == MINDFORMERS:
            time, (prefix, suffix) = times[id(candidate)], _generation(candidate)
            before = [(number, used) for name, used, number in numbers if name == prefix and used <= suffix]
            number, used = max(before, default=(0.0, suffix))
            if before and used == suffix:               # an emergency save of mindformers within a run of mindresume
                placed.append(replace(candidate, order=(number, candidate.step or 0, time), saved_at=time))
                continue
            generation = number + 0.5 if before else float("inf") if prefix in later - known else 0.0
            begun = max(at for name, used, at in generations if name == prefix and used <= suffix) if len(prefixes) > 1 else 0.0
            position = candidate.order[1] if len(candidate.order) > 1 else -1.0
            candidate = replace(candidate, saved_at=time, order=(generation, begun, suffix, position, time))
        placed.append(candidate)
    return placed, _by_time(prefixes, known)


def _by_time(foreign: set[str], ours: set[str]) -> list[str]:
    """Returns a note if only file times can order the prefixes of ``foreign`` and ``ours`` files."""
    if len(foreign) < 2 and (not ours or foreign <= ours):
        return []
    names = [repr(prefix) if prefix else "names of another form" for prefix in sorted(foreign | ours)]
    return [f"the names of {', '.join(names)} have no common prefix: they are ordered by the times of their files, which copying "
            f"loses"]


def _generation(candidate: Candidate) -> tuple[str, int]:
    """Returns (prefix, suffix) of the names of a candidate's files; ("", 0) for names of another form."""
    parsed = parse_name(os.path.basename(candidate.first.path)) if candidate.first else None
    return (parsed.prefix, parsed.suffix) if parsed else ("", 0)


def labelled_files(directory: CheckpointDir, run: str, step: int) -> list[str]:
    """Returns the paths of all ranks' files whose label has this run and step, for clean-up. Lists every rank folder. Files whose
    names differ only in the rank belong to one save: the header of one readable file is read for each such name, and those of the
    others only if that one matches."""
    folders = [name for name in directory.storage.list(directory.root) if folder_rank(name) is not None]
    listings = parallel(directory.storage, lambda folder: directory.storage.list(directory.path(folder)), folders)
    groups: dict[FileName, list[FileRecord]] = {}
    for folder, names in zip(folders, listings, strict=True):
        for name in names:
            parsed = parse_name(name)
            if parsed is not None:
                groups.setdefault(parsed._replace(rank=0), []).append(FileRecord(f"{folder}/{name}", parsed.format))

    def label_of(file: FileRecord) -> tuple[str, int] | None | bool:
        """Returns the label of a file; False if it cannot be read."""
        try:
            return parse_label(header_of(directory, file))
        except CorruptFileError:
            return False
    found = []
    for files in groups.values():
        first = next((label for label in map(label_of, files) if label is not False), None)
        if first == (run, step):
            labels = parallel(directory.storage, label_of, files)
            found += [directory.path(file.path) for file, label in zip(files, labels, strict=True) if label == first]
    return found

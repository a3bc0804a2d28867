"""Names, small files and scan of Checkpoint 2.0: one folder per step with the weights of all ranks,
and a tracker that names the last step.

    {root}/iteration_00000020/qwen3-model-0000003-0000008.safetensors, qwen3-opt-..., common.json
    {root}/iteration_00000020/metadata.json                  only with two ranks or more; see
                                                             ``metadata``
    {root}/iteration_{step}/.mindresume/step-...-run-.../    records and manifest, if mindresume
                                                             wrote it
    {root}/latest_checkpointed_iteration.txt                 the tracker: "20"
    {root}/.mindresume/step-...-run-.../                     an iteration folder that is not
                                                             published yet
    {root}/.mindresume/tracker-{step}                        intent file: exists while the tracker
                                                             is being changed to that step

mindformers documents that users may edit the tracker, so selection begins with the step it names,
and newer steps come last. Two kinds of newer steps are not the result of an edit: a folder whose
writer died before it could change the tracker (its intent file still exists), and one that all
ranks have finished but rank 0 has not committed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import attrgetter

from mindresume.errors import CorruptFileError, RecordError, UnreadableFileError
from mindresume.formats import (
    FIRST,
    MINDFORMERS,
    Candidate,
    CheckpointDir,
    Refusal,
    unlisted_candidate,
)
from mindresume.formats.weight_files import existing, state_from_scalars
from mindresume.formatting import listed
from mindresume.model.manifest import FOLDER, FileRecord, attempts
from mindresume.model.training_state import GlobalStep, Positive, TrainingState
from mindresume.storage import Storage
from mindresume.tensor_files.header import parse_object
from mindresume.typed import Count, Number, decode, is_count

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.json"
METADATA = "metadata.json"
MODEL = "model"
OPTIMIZER = "opt"
MAX_ITERATION = 10**18 - 1
MAX_COMMON = 1 << 20  # bytes; six numbers need 200
_FOLDER = re.compile(r"iteration_([0-9]{1,18})")
_WEIGHTS = re.compile(
    r"(?:(?P<prefix>[^/\n]*)-)?(?P<kind>model|opt)-(?P<index>[0-9]{7,18})-(?P<count>[0-9]{7,18})"
    r"\.safetensors"
)
_LATER = ("ckpt_status", "consumed_samples")  # keys of releases after 1.8.0
_TRACKER_LIMIT = 1 << 10  # bytes
_INTENT = re.compile(r"tracker-([0-9]{10,18})")


# ---- names and small files -----------------------------------------------------------------------


def iteration_name(step: int) -> str:
    """Returns the name of the folder of ``step`` (mindformers
    checkpoint/utils.py:get_checkpoint_iter_dir). Raises ValueError for a step that no name can
    express."""
    if not is_count(step, 0, MAX_ITERATION):
        raise ValueError(f"a step is a whole number from 0 to {MAX_ITERATION}, found {step!r}")
    return f"iteration_{step:08d}"


def parse_iteration(name: str) -> int | None:
    """Returns the step of an iteration folder, with any number of digits (documents show 7,
    mindformers writes 8); None for another name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class WeightFile:
    """The parts of a weight file's name.

    Attributes:
        prefix: None if the name has none.
        kind: MODEL or OPTIMIZER.
        index: from 0 to ``count`` - 1; the rank, unless redundancy was removed.
        count: number of files of this kind.
    """

    prefix: str | None
    kind: str
    index: int
    count: int

    def __str__(self) -> str:
        head = "" if self.prefix is None else f"{self.prefix}-"
        return f"{head}{self.kind}-{self.index:07d}-{self.count:07d}.safetensors"


def parse_weight_file(name: str) -> WeightFile | None:
    """Parses a file name by mindformers' rule (checkpoint/utils.py:get_checkpoint_name); returns
    None for any other name."""
    found = _WEIGHTS.fullmatch(name)
    if not found:
        return None
    file = WeightFile(found["prefix"], found["kind"], int(found["index"]), int(found["count"]))
    return file if file.index < file.count and str(file) == name else None


@dataclass(frozen=True)
class CommonInfo:
    """The content of ``common.json``, in the order of mindformers
    (checkpoint/checkpoint.py:CommonInfo); None means unknown.

    ``step_num`` is the absolute step, ``global_step`` the optimizer's own counter; ``ckpt_status``
    is 0 if healthy, 1 if not; ``consumed_samples`` (since 2.1.0) counts what a PyNative training
    has read. mindformers divides by ``global_batch_size`` and computes with ``epoch_num`` when it
    resumes: always write both.
    """

    epoch_num: Count | None = None
    step_num: Count | None = None
    global_step: GlobalStep | None = None
    loss_scale: Number | None = None
    global_batch_size: Positive | None = None
    ckpt_status: Count | None = None
    consumed_samples: Count | None = None


def parse_common(data: bytes, path: str) -> CommonInfo:
    """Parses ``common.json``. Ignores unknown keys (2.1.0 has more); missing ones are None (1.8.0
    has no ckpt_status), but ``step_num`` is required. Raises CorruptFileError if the file is empty,
    torn or not an object, or a value has the wrong type.
    """
    if not data:
        raise CorruptFileError(
            path,
            "it is empty, expected the JSON object that mindformers writes: the save did not "
            "finish",
        )
    if len(data) > MAX_COMMON:
        raise CorruptFileError(
            path, f"it has {len(data)} bytes, expected a JSON object of at most {MAX_COMMON}"
        )
    found = parse_object(data, path, COMMON)
    if found.get("step_num") is None:
        raise CorruptFileError(
            path, "step_num is missing, expected the number of the step: it cannot be resumed from"
        )
    try:
        return decode(CommonInfo, found, COMMON)
    except RecordError as error:
        raise CorruptFileError(path, str(error).removeprefix(f"{COMMON}: ")) from error


def encode_common(common: CommonInfo) -> bytes:
    """Returns the bytes of ``common.json`` as mindformers 1.8.0 writes them. The keys of later
    releases are only there if they have a value: the readers of older releases reject keys that
    they do not know, and all read a missing one as null.

    Raises:
        ValueError: A value could not be read back.
    """
    row = {
        key: value
        for key, value in asdict(common).items()
        if key not in _LATER or value is not None
    }
    data = json.dumps(row, ensure_ascii=False, indent=4).encode()
    try:
        parse_common(data, COMMON)
    except CorruptFileError as error:
        raise ValueError(f"these values cannot be written to {COMMON}: {error.reason}") from error
    return data


def parse_tracker(data: bytes) -> int | str:
    """Returns the step in the tracker, or a phrase for why there is none. Allows white space around
    the number, as people edit the file."""
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        return "it is not text, expected the number of a step"
    if not text:
        return "it is empty, expected the number of a step"
    if re.fullmatch(r"-[0-9]+", text):
        return f"{text[:40]!r} is negative, expected the number of a step"
    if not re.fullmatch(r"[0-9]+", text):
        return f"{text[:40]!r} is not a whole number, expected the number of a step"
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(MAX_ITERATION)):
        return (
            f"a number of {len(digits)} digits, expected the number of a step, at most "
            f"{MAX_ITERATION}"
        )
    return int(digits)


def intent_name(step: int) -> str:
    """Returns the name of the file that announces a change of the tracker to ``step``."""
    return f"tracker-{step:010d}"


# ---- scanning ------------------------------------------------------------------------------------


def scan_iterations(
    directory: CheckpointDir, top: list[str], attempted: list[str], ours: list[Candidate]
) -> tuple[list[Candidate], list[str]]:
    """Returns candidates for all iteration folders, in the order in which a resume tries them, and
    notes. For a folder without records, reads its names and ``common.json``.

    Args:
        directory: the checkpoint directory.
        top: names in ``root``.
        attempted: names in its folder of records.
        ours: candidates with records.
    """
    known, has_tracker = {candidate.iteration_dir for candidate in ours}, TRACKER in top
    folders = [name for name in top if parse_iteration(name) is not None and name not in known]
    foreign = [
        candidate
        for name in folders
        if (candidate := candidate_without_records(directory, name, has_tracker))
    ]
    if foreign:
        foreign = [_place(directory, candidate, ours) for candidate in _without_optimizer(foreign)]
    by_age = sorted(foreign + ours, key=attrgetter("order"), reverse=True)
    if not has_tracker:
        is_lost = any(candidate.maybe_completed for candidate in ours)
        return by_age, [f"{TRACKER} is missing; taking the newest complete one"] if is_lost else []
    named = _read_tracker(directory)
    if isinstance(named, str):
        return by_age, [f"{TRACKER}: {named}; taking the newest complete one"]
    return _from_tracker(by_age, named, intents(attempted))


def _from_tracker(
    by_age: list[Candidate], named: int, intended: set[int]
) -> tuple[list[Candidate], list[str]]:
    """Orders candidates: first the step ``named`` by the tracker, then older steps, then newer
    ones. Returns them and notes."""
    notes = []
    visible = [c for c in by_age if parse_iteration(c.iteration_dir) is not None]
    # A published folder was committed before, even if its manifest can no longer be read.
    newest = next(
        (c for c in visible if c.committed or (c.maybe_completed and not c.listing_error)), None
    )
    last = next((c for c in by_age if c.committed and _is_announced(c, intended)), None)
    if last is not None and last.step in intended and last.step != named:
        notes.append(
            f"{TRACKER} names step {named}: the job that saved step {last.step} died before it "
            "could change it"
        )
        named, newest = last.step or named, last
    elif not any(c.step == named for c in visible):
        notes.append(f"{TRACKER} names step {named}, which does not exist")
    # Steps that all ranks finished but rank 0 did not commit come first, unless the tracker was set
    # back.
    ready = []
    if newest is None or newest.step == named:
        ready = [
            c
            for c in by_age
            if c not in visible
            and c.maybe_completed
            and c.problem is None
            and (newest is None or c.order > newest.order)
        ]
    upto = sorted(
        (c for c in by_age if c not in ready and (c.step or 0) <= named),
        key=lambda c: (c.step or 0, c.order),
        reverse=True,
    )
    newer = [c for c in by_age if c not in ready and (c.step or 0) > named]
    steps = [c.step for c in newer if c.maybe_completed]
    if steps:
        notes.append(
            f"newer than step {named}, which {TRACKER} names, so only used as a last resort: step "
            f"{listed(steps)}"
        )
    return ready + upto + newer, notes


def _is_announced(candidate: Candidate, intended: set[int]) -> bool:
    """Returns whether a committed step can explain why the tracker names another one. A save writes
    its intent file before it changes the tracker, so a step with neither an intent nor a published
    folder does not."""
    return candidate.step in intended or parse_iteration(candidate.iteration_dir) is not None


def intents(attempted: list[str]) -> set[int]:
    """Returns the steps that have an intent file. ``attempted``: names in the folder of records."""
    return {int(found[1]) for found in map(_INTENT.fullmatch, attempted) if found}


def tracked(directory: CheckpointDir) -> int | None:
    """Returns the step that the tracker names; None if it is missing or names none."""
    found = _read_tracker(directory)
    return None if isinstance(found, str) else found


def _read_tracker(directory: CheckpointDir) -> int | str:
    """Returns what ``parse_tracker`` says of the tracker; one that cannot be read counts as
    empty."""
    data = b""
    with suppress(OSError), directory.storage.open(directory.path(TRACKER)) as file:
        data = file.read(_TRACKER_LIMIT)
    return parse_tracker(data)


def _place(directory: CheckpointDir, candidate: Candidate, ours: list[Candidate]) -> Candidate:
    """Sets the order of a save without records: after the last run of mindresume that had reached
    its step. mindformers does not number its runs, and copying loses file times. If this is wrong,
    the tracker corrects it."""
    step = candidate.step or 0
    if candidate.listing_error:
        return replace(candidate, order=(*FIRST, step))
    status = next(iter(existing(directory, candidate.all_files[:1])), None)
    number = max(
        (c.order[0] for c in ours if c.maybe_completed and (c.step or 0) <= step), default=0.0
    )
    return replace(candidate, order=(number, step, -1.0), saved_at=status.mtime if status else None)


# ---- folders without records ---------------------------------------------------------------------


def candidate_without_records(
    directory: CheckpointDir, name: str, tracked: bool = True
) -> Candidate | None:
    """Returns the candidate for ``name``, a folder in ``root`` that mindformers wrote; None if it
    is not a folder. ``tracked``: a tracker exists; without one, no save of mindformers has ever
    completed."""
    step, place = parse_iteration(name), name
    try:
        # before its status, which is None for a link to itself
        names = directory.storage.list(directory.path(name))
        status = directory.storage.status(directory.path(name))
        # no records were found: check that there are none
        if FOLDER in names:
            place = f"{name}/{FOLDER}"
            if any(attempts(directory.storage.list(directory.path(place)))):
                raise OSError(
                    errno.EAGAIN, "it holds records that could not be listed a moment ago"
                )
    except OSError as error:
        return unlisted_candidate(error, place, step=step, iteration_dir=name)
    if status is None or not status.is_folder:
        return None
    found = sorted(
        filter(None, map(parse_weight_file, names)),
        key=lambda file: (file.index, file.kind != MODEL),
    )
    files: dict[int, tuple[FileRecord, ...]] = {}
    for file in found:
        files[file.index] = (
            *files.get(file.index, ()),
            FileRecord(f"{name}/{file}", "safetensors"),
        )
    world = max((file.count for file in found), default=0)
    candidate = Candidate(step, MINDFORMERS, "safetensors", files, world, iteration_dir=name)
    missing = _missing(name, found, names)
    if missing:
        return replace(candidate, maybe_completed=tracked, problem=candidate.refuse(*missing))
    try:
        common = load_common(directory, name)
    except CorruptFileError as error:
        return replace(
            candidate,
            problem=candidate.refuse(f"{COMMON}: {error.reason}", f"{name}/{COMMON}", error=error),
        )
    if step is not None and step == common.global_step and (common.step_num or 0) > step:
        # mindformers' PyNative trainer writes the last step of the training there
        common = replace(common, step_num=step)
    if step not in (None, common.step_num):
        return replace(
            candidate,
            problem=candidate.refuse(
                f"{COMMON} is of step {common.step_num}, the folder of step {step}: they do not "
                "belong together",
                f"{name}/{COMMON}",
            ),
        )
    return replace(
        candidate, step=common.step_num, state=state_from_common(common), epoch=common.epoch_num
    )


def _without_optimizer(candidates: list[Candidate]) -> list[Candidate]:
    """Refuses to resume from steps of one rank without a file of the optimizer if other steps of
    this folder have one: it may have been forgotten in a copy. Of several ranks, ``metadata.json``
    names the files. A folder in which no step has such a file was saved with ``no_save_optim``."""
    kinds = [
        {
            file.kind: file
            for record in candidate.all_files
            if (file := parse_weight_file(os.path.basename(record.path)))
        }
        for candidate in candidates
    ]
    complete = {
        found[OPTIMIZER].prefix: candidate.iteration_dir
        for found, candidate in zip(kinds, candidates, strict=True)
        if OPTIMIZER in found and candidate.problem is None
    }
    checked = []
    for found, candidate in zip(kinds, candidates, strict=True):
        model = found.get(MODEL)
        if (
            candidate.problem is None
            and model is not None
            and OPTIMIZER not in found
            and model.prefix in complete
        ):
            path = f"{candidate.iteration_dir}/{replace(model, kind=OPTIMIZER)}"
            candidate = replace(
                candidate,
                problem=Refusal(
                    candidate.step,
                    f"{path} is missing, and {complete[model.prefix]} has such a file: without "
                    "optimizer state only "
                    f"its weights can be loaded. Copy the file, if it was forgotten",
                    path,
                    is_weights_only=True,
                ),
            )
        checked.append(candidate)
    return checked


def _missing(name: str, found: list[WeightFile], names: list[str]) -> tuple[str, str] | None:
    """Returns (problem, file) if files that belong together are incomplete or mixed; else None."""
    if not found:
        return (
            "the folder holds no weights: the save did not finish, or its files were removed",
            name,
        )
    for kind in (MODEL, OPTIMIZER):
        files = [file for file in found if file.kind == kind]
        if not files and kind == MODEL:
            return f"no {{prefix}}-{MODEL}-... file: the weights of the network are missing", name
        for other in files:
            if (other.prefix, other.count) != (files[0].prefix, files[0].count):
                return (
                    f"{other} and {files[0]} are in one folder: files of two saves are mixed",
                    f"{name}/{other}",
                )
        if files and len(files) < files[0].count:
            # The count comes from a file name and may be huge, so missing files are not enumerated.
            there, count = {file.index for file in files}, files[0].count
            absent = list(islice((index for index in range(count) if index not in there), 8))
            more = count - len(there) - len(absent)
            return (
                f"{len(files)} of {count} {kind} files are there, missing: {listed(absent)}"
                + (f" and {more} more" if more else "")
            ), f"{name}/{replace(files[0], index=absent[0])}"
    if METADATA not in names and max(file.count for file in found) > 1:
        return (
            f"{METADATA} is missing: the sharding of the tensors in "
            f"{max(file.count for file in found)} files is unknown",
            f"{name}/{METADATA}",
        )
    return (f"{COMMON} is missing", f"{name}/{COMMON}") if COMMON not in names else None


def content_of(storage: Storage, path: str, limit: int) -> bytes:
    """Returns the first ``limit`` + 1 bytes of a file. Raises CorruptFileError if it is missing,
    UnreadableFileError if that is not known."""
    try:
        with storage.open(path) as file:
            return file.read(limit + 1)
    except OSError as error:
        kind = CorruptFileError if isinstance(error, FileNotFoundError) else UnreadableFileError
        raise kind(path, f"it cannot be read: {error.strerror or error}") from error


def load_common(directory: CheckpointDir, name: str) -> CommonInfo:
    """Reads ``common.json`` of iteration folder ``name``. Raises CorruptFileError if it is missing,
    or not as mindformers writes it; UnreadableFileError if that is not known."""
    path = directory.path(name, COMMON)
    return parse_common(content_of(directory.storage, path, MAX_COMMON), path)


def state_from_common(common: CommonInfo) -> TrainingState:
    """Returns the training state in ``common.json``."""
    state = state_from_scalars(
        common.step_num or 0,
        common.epoch_num,
        common.global_step,
        common.global_batch_size,
        common.loss_scale,
    )
    return replace(state, health=common.ckpt_status, consumed=common.consumed_samples)


def common_from_state(state: TrainingState, with_samples: bool = False) -> CommonInfo:
    """Returns the content of ``common.json`` from which mindformers resumes.

    ``with_samples``: mindformers knows the key ``consumed_samples`` (since 2.1.0). It is there only
    if step and batch size do not give the number, because older releases refuse a file that has it.
    """
    inferred = state.step * (state.global_batch_size or 0)
    return CommonInfo(
        state.epoch,
        state.step,
        state.global_step,
        state.loss_scale,
        state.global_batch_size,
        state.health,
        state.consumed if with_samples and state.consumed != inferred else None,
    )

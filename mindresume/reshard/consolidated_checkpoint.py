"""Presents consolidated weights, a folder or a file, as a checkpoint to a job, ``ls``, ``which``
and ``verify``.

source = ConsolidatedSource(group, full=True, resume=True)
choice = source.choose(storage, path)           # and source.opened
scan, (row,) = survey(storage, path)
candidate, problems = verify(storage, path, row, progress)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from mindresume.coordination.collectives import Group, Watchdog, gather_results
from mindresume.errors import CorruptFileError, MindResumeError, MissingCheckpointError
from mindresume.events.progress import Counted
from mindresume.formats import MERGED, MINDFORMERS, Candidate, CheckpointDir, Refusal, Scan
from mindresume.formats.consolidated import ConversionManifest, conversion_manifest_of
from mindresume.formatting import listed
from mindresume.model.manifest import FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_consolidated
from mindresume.reshard.range_reader import Traffic
from mindresume.reshard.region_load import check_tensors
from mindresume.resume.candidates import CheckpointStatus
from mindresume.resume.eligible import Choice
from mindresume.resume.verifier import OnBytesRead
from mindresume.storage.interface import Storage
from mindresume.tensor_files import damaged_tensors, file_checksum, read_header


def candidate_of(source: OpenCheckpoint, state: TrainingState | None) -> Candidate:
    """Returns consolidated weights as one saved step of one rank."""
    files = (
        source.made.files
        if source.made
        else tuple(
            FileRecord(os.path.basename(path), header.format)
            for path, header in source.weights.headers.items()
        )
    )
    step, epoch = (state.step, state.epoch) if state else (None, None)
    return Candidate(
        step,
        MERGED if source.made else MINDFORMERS,
        files[0].format,
        {0: files},
        1,
        state,
        epoch=epoch,
    )


@dataclass
class ConsolidatedSource:
    """Consolidated weights as a source of a selection (``resume.selection.ConsolidatedWeights``).

    Args:
        full: every rank reads its share of the bytes and compares the recorded checksums, if there
            are any.
        resume: the step of the training is required.
        opened: the weights of the last choice.
    """

    group: Group
    full: bool
    resume: bool
    opened: OpenCheckpoint | None = None

    def choose(self, storage: Storage, path: str) -> Choice:
        """Returns consolidated weights as the choice of a selection.

        Raises:
            CollectiveError: on all ranks, if one finds damage.
            MissingCheckpointError: the weights hold no step, and ``resume`` is set.
        """
        read = Counted()
        state = gather_results(
            self.group,
            partial(self._check, storage, path, read),
            Watchdog(f"checking {path}", read),
        )[0]
        if state is None and self.resume:
            raise MissingCheckpointError(
                f"{path} holds consolidated weights, but no step_num: no training can be resumed "
                "from them. With resume_training: False they are loaded as weights only"
            )
        chosen = candidate_of(self.opened, TrainingState.from_json(state) if state else None)
        return Choice(chosen, (), self.opened.notes, False, (), self.opened.weights.name, self.full)

    def _check(self, storage: Storage, path: str, read: Counted) -> object:
        """Opens the weights, and reads this rank's share. Returns their state as JSON."""
        source = self.opened = open_consolidated(storage, path)
        if self.full and source.made and source.made.shapes:
            check_tensors(
                source.weights,
                sorted(source.weights.tensors)[self.group.rank :: self.group.size],
                traffic=Traffic(progress=read.advance),
            )
        elif self.full and source.made:
            # of an earlier version: only checksums of files cover dtypes and shapes
            for file in source.made.files[self.group.rank :: self.group.size]:
                if problem := _file_problem(
                    storage, source.weights.name, source.made, file, read.advance
                ):
                    raise CorruptFileError(
                        os.path.join(source.weights.name, file.path), problem.reason
                    )
        return source.state.to_json() if source.state else None


def survey(storage: Storage, path: str) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
    """Checks names, index, headers and sizes; reads no tensor. Returns for consolidated weights
    what ``resume.candidates.list_checkpoints`` returns for folders with several steps."""
    problem = None
    try:
        source = open_consolidated(storage, path)
        candidate = candidate_of(source, source.state)
    except (MindResumeError, OSError) as error:
        problem = Refusal(None, str(error))
        if isinstance(error, CorruptFileError):
            problem = Refusal(
                None,
                error.reason,
                os.path.relpath(error.path, _folder(path)),
                tensors=(error.tensor,) if error.tensor else (),
            )
        candidate = Candidate(None, MINDFORMERS, "safetensors", {}, 1, problem=problem)
    return Scan(CheckpointDir(storage, _folder(path)), (candidate,)), (
        CheckpointStatus(candidate, problem),
    )


def verify(
    storage: Storage,
    path: str,
    row: CheckpointStatus,
    progress: OnBytesRead,
    part: tuple[int, int] = (1, 1),
) -> tuple[Candidate, list[Refusal]]:
    """Reads every byte of the files that have a checksum in ``conversion.json``, of those of
    ``part``. Returns the candidate and the refusals; if it finds none, that of ``row``, the result
    of ``survey``."""
    try:
        made = conversion_manifest_of(storage, path)
    except CorruptFileError:
        made = None  # it is the problem that ``survey`` found
    found = []
    if made is not None:
        for file in made.files[part[0] - 1 :: part[1]]:
            if bad := _file_problem(storage, _folder(path), made, file, progress):
                found.append(bad)
    return row.candidate, found or ([row.problem] if row.problem else [])


def _file_problem(
    storage: Storage, folder: str, made: ConversionManifest, file: FileRecord, progress: OnBytesRead
) -> Refusal | None:
    path = os.path.join(folder, file.path)
    try:
        status = storage.status(path)
        # before its bytes: it can be sparse, of terabytes
        if status is not None and status.size != file.size:
            return Refusal(
                None, f"{file.path} has {status.size} bytes, {file.size} were written", file.path
            )
        with storage.open(path) as opened:
            checksum, size = file_checksum(opened, progress)
            if (checksum, size) == (file.checksum, file.size):
                return None
            names = read_header(opened, path).tensors
            wrong = damaged_tensors(
                opened, path, {name: made.tensors[name] for name in names if name in made.tensors}
            )
    except FileNotFoundError:
        return Refusal(None, f"{file.path} is missing", file.path)
    except (CorruptFileError, OSError) as error:
        return Refusal(
            None,
            f"{file.path}: {error.reason if isinstance(error, CorruptFileError) else error}",
            file.path,
        )
    damaged = listed(wrong, 3) if wrong else "no tensor, but the header or its padding"
    return Refusal(
        None,
        f"{file.path} is not what was written; damaged: {damaged} (checksum {checksum}, recorded "
        f"{file.checksum})",
        file.path,
        tensors=tuple(wrong),
    )


def _folder(path: str) -> str:
    return os.path.dirname(path) or "." if os.path.isfile(path) else path

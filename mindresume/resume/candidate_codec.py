"""Encodes a candidate as JSON and decodes it: rank 0 broadcasts the candidate that all ranks verify."""
from __future__ import annotations

from dataclasses import fields
from typing import Any

from mindresume.formats import Candidate
from mindresume.model.file_record import FileRecord
from mindresume.model.training_state import TrainingState


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    """Returns the JSON object of a candidate without a problem."""
    # asdict would copy thousands of file rows, which are encoded in another form below
    value = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
    value.update(problem=None, state=candidate.state.to_json() if candidate.state else None)
    value["files"] = [[rank, *(file.to_json() for file in files)] for rank, files in candidate.files.items()]
    value["metadata_files"] = [file.to_json() for file in candidate.metadata_files]
    return value


def candidate_from_json(value: dict[str, Any]) -> Candidate:
    """Returns the candidate of ``candidate_to_json``."""
    return Candidate(**{**value, "files": {rank: tuple(map(FileRecord.from_json, rows)) for rank, *rows in value["files"]},
                        "metadata_files": tuple(map(FileRecord.from_json, value["metadata_files"])),
                        **{name: tuple(value[name]) for name in ("order", "missing_ranks", "local_ranks", "records")},
                        "state": TrainingState.from_json(value["state"]) if value["state"] else None})

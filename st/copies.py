"""What the tests with one process do around their trainings: copies of a run's checkpoints, damage, records, several at once."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mindresume.model.manifest import FOLDER, MANIFEST, Record, parse_attempt, read_record, record_name
from mindresume.tensor_files import read_header, read_scalar
from st.jobs import ROOT, SIZES, Run

Result = TypeVar("Result")
PROGRAMS = ROOT / "st" / "programs"
CORES = 2                            # trainings at a time; a short one is mostly a single thread that imports and compiles
LIMIT = 300.0                        # seconds one training may take


def without_options(run: Run, name: str, changes: Mapping[str, Any] | None = None) -> Run:
    """Makes ``run`` one of a program in PROGRAMS that takes none: ONE_LAYER and ``changes`` are in its configuration."""
    run.program, run.options = PROGRAMS / name, ""
    return run.configure({**SIZES, **(changes or {})})


def upstream(run: Run, changes: Mapping[str, Any] | None = None) -> str:
    """Makes ``run`` one of a start script that knows nothing of us, with one line in its configuration that brings us in, and
    ``changes``. Returns the argument that its command line needs."""
    without_options(run, "upstream_style.py", {**(changes or {}), "trainer.auto_register": "mindresume_plugin.MindResume"})
    return f"--register_path {run.mindresume('plugin-path').stdout.strip()}"


def together(*jobs: Callable[[], Result]) -> list[Result]:
    """The results of all jobs in order; two run at a time."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(lambda job: job(), jobs))


def beside(run: Run, folder: Path, copied: bool = True) -> Run:
    """A run like ``run`` in another folder; ``copied``: with its checkpoints, as if it had made them itself."""
    if copied:
        shutil.copytree(run.checkpoints, folder / "output" / "checkpoint")
    return run.like(folder)


def finished(run: Run, *extra: str, **environment: str) -> Run:
    """Starts the run and waits for its end, whatever it is: ``run.process.returncode``, ``run.log()``, ``run.steps(-1)``."""
    run.start(" ".join(extra), **environment).wait(LIMIT)
    return run


def succeeded(run: Run, *extra: str, **environment: str) -> Run:
    """``finished``; AssertionError with the end of the log if the exit status is not 0."""
    return run.start(" ".join(extra), **environment).ended(LIMIT)


def steps_of(run: Run) -> list[int]:
    """The numbers of the steps that the last life recorded."""
    return [row["step"] for row in run.steps(-1)]


def records(run: Run, life: int | None = None) -> dict[int, Record]:
    """{step: record of rank 0} of everything that is committed, of all runs or of the one with that number (from 1)."""
    found = {}
    for attempt in sorted((run.checkpoints / FOLDER).iterdir()):
        if parse_attempt(attempt.name) and (attempt / MANIFEST).exists():
            with open(attempt / record_name(0), "rb") as file:
                record = read_record(file)[0]
            if life is None or int(record.run.split("-")[0]) == life:
                found[record.step] = record
    return found


def names(run: Run, life: int | None = None) -> dict[int, str]:
    """{step: file name of rank 0} of everything that is committed."""
    return {step: Path(record.files[0].path).name for step, record in records(run, life).items()}


def weights(run: Run, step: int) -> Path:
    """The file of rank 0 of a committed step."""
    return run.checkpoints / records(run)[step].files[0].path


def counter(path: Path, name: str) -> int | float | None:
    """A counter in a file of weights, such as step_num."""
    with open(path, "rb") as file:
        return read_scalar(file, read_header(file, str(path)), name)


def meta(run: Run) -> dict:
    return json.loads((run.checkpoints / "rank_0" / "meta.json").read_text(encoding="utf-8"))


def flip(path: Path) -> None:
    """One bit in the middle of the file, as a disk or a network would: size and times of other files stay."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lines(run: Run, text: str) -> list[str]:
    """The lines of the last life's log that contain ``text``."""
    return [line for line in run.log().splitlines() if text in line]


def said(run: Run, *texts: str) -> None:
    """AssertionError, with what mindresume said, if no line of the last life's log contains all of ``texts``."""
    found = any(all(text in line for text in texts) for line in run.log().splitlines())
    assert found, f"no line with {texts}; mindresume said:\n" + "\n".join(lines(run, "mindresume"))


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """The events of this kind that rank 0 of the last life recorded."""
    files = sorted((run.folder / "output" / "mindresume_events").glob("*-rank_0-*.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in files[-1].read_text(encoding="ascii").splitlines()] if files else []
    return [row for row in rows if row["event"] == kind]


def happened(run: Run, kind: str, **values: Any) -> None:
    """AssertionError if there is no event of this kind with these values."""
    found = events(run, kind)
    assert any(all(row.get(name) == value for name, value in values.items()) for row in found), \
        f"no {kind} with {values}: {found}"

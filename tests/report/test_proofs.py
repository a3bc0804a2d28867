"""report/builder.py and ``mindresume proof``: what is said of each resume."""

import json
import sys

import pytest

from mindresume import cli
from mindresume.events import (
    FAILED,
    FINISHED,
    Resumed,
    ResumeDiffers,
    ResumeProved,
    RunOpened,
    TrainingEnded,
)
from mindresume.events.event_file import EventFile
from mindresume.report.builder import DIFFERS, NOT_PROVED, PROVED, WEIGHTS_ONLY, proofs_in

OPENED = RunOpened("0002-aaaaaaaa", "output/checkpoint", "net", 1)
ENDED = TrainingEnded(FINISHED)
DIFFERENCE = ResumeDiffers(31, "loss", "0001-aaaaaaaa", "step 31, loss 2.5", "step 31, loss 2.6")
ALTERED = TrainingEnded(FAILED, "AlteredWeightsError: rank 0: 1 of 33 tensors")


def written(folder, *events, at=100.0):
    file = EventFile(str(folder), 0)
    for second, event in enumerate([OPENED, *events]):
        file.handle(event, at + second)
    file.close()


def ended(words):
    """The exit status of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mindresume", *words])
        try:
            cli.main()
        except SystemExit as end:
            return end.code or 0
    return 0


@pytest.mark.parametrize(
    "events, verdict, text",
    [
        ([ResumeProved(30, 33, 10, 10, 0, 0.0, ("loss",)), ENDED], PROVED, ""),
        ([ResumeProved(30, 33, unproved="no step is done again")], WEIGHTS_ONLY, "no step is"),
        ([ResumeProved(30, 0, unproved="no step is done again")], NOT_PROVED, "no step is"),
        ([ResumeProved(30, 0, 10, 10, unproved="proof: off")], NOT_PROVED, "proof: off"),
        ([], NOT_PROVED, "nothing has been compared yet"),
        ([DIFFERENCE, ResumeProved(30, 33, 10, 10, 3, 0.1)], DIFFERS, "step 31 differs"),
        # the file was full
        ([ResumeProved(30, 33, 10, 10, 3, 0.1)], DIFFERS, "3 of 10 steps"),
        ([DIFFERENCE], DIFFERS, "step 31 differs"),
        ([ALTERED], DIFFERS, "1 of 33 tensors"),
        ([TrainingEnded(FAILED, "OSError: a disk")], NOT_PROVED, "nothing has been compared yet"),
    ],
)
def test_the_verdict_of_a_resume(tmp_path, capsys, events, verdict, text):
    written(tmp_path, Resumed(30), *events)
    (proof,) = proofs_in([str(tmp_path)])
    assert (proof.verdict, proof.run_id, proof.step) == (verdict, OPENED.run_id, 30)
    assert text in proof.text and bool(proof.text) is bool(text)
    status = ended(["proof", str(tmp_path)])
    shown = capsys.readouterr().out
    assert status == (1 if verdict == DIFFERS else 0) and OPENED.run_id in shown
    assert ended(["proof", str(tmp_path), "--json"]) == status
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["verdict"], row["text"]) == (verdict, proof.text)


def test_fresh_starts_are_no_resumes(tmp_path, capsys):
    written(tmp_path, ENDED)
    assert proofs_in([str(tmp_path)]) == [] and ended(["proof", str(tmp_path)]) == 3
    assert f"no resume is recorded in {tmp_path}" in capsys.readouterr().err
    assert ended(["proof", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == []


def test_the_page_has_a_row_for_each_resume(tmp_path):
    written(tmp_path, Resumed(30), ResumeProved(30, 33, 10, 10, 0, 0.25, ("loss",)), ENDED)
    written(tmp_path, Resumed(35), DIFFERENCE, ALTERED, at=200.0)
    assert ended(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "weights and steps are the same" in page and "step 31 differs" in page and "0.25" in page

"""`mindresume which`, `ls` and `verify` on folders that mindformers 1.8.0 and 1.9.0 wrote by
themselves, whole and with a file or a folder missing. (Other damage: the judge.)

The folders are in st/fixtures, with what a resume must choose in their steps.json. No training runs
here.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from mindresume.cli import main
from st.training_run import ROOT

FIXTURES = ROOT / "st" / "fixtures"
PLAIN = "mf190_10_safetensors_dp2tp2"
NAMES = [
    PLAIN,
    f"{PLAIN}_nodup",
    f"{PLAIN}_sink2",
    "mf190_10_ckpt_dp2tp2opt",
    "mf180_10_ckpt_tp2",
    "mf190_10_safetensors_single",
]
EPOCHS = {f"{PLAIN}_sink2": 12}  # of the newest step; a sink counts as an epoch


def call(command: str, folder: Path, *more: str) -> tuple[int, dict]:
    """Exit status and the JSON that the command printed, in this process: its start takes longer
    than its work."""
    with (
        mock.patch.object(sys, "argv", ["mindresume", command, "--json", str(folder), *more]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        main()
        sys.exit(0)
    return ended.value.code or 0, json.loads(printed.getvalue())


def steps_of(name: str) -> dict[int, list[str]]:
    """{step: files of all ranks}, relative to the fixture, oldest first."""
    known = json.loads((FIXTURES / name / "steps.json").read_text(encoding="utf-8"))
    return {
        int(step): [file for files in ranks.values() for file in files]
        for step, ranks in known["steps"].items()
    }


def newest_of(name: str) -> int:
    return json.loads((FIXTURES / name / "steps.json").read_text(encoding="utf-8"))["newest"]


@pytest.fixture()
def folder(request, tmp_path) -> Path:
    """A copy of the output folder of a fixture, default PLAIN, to be damaged."""
    return Path(
        shutil.copytree(FIXTURES / getattr(request, "param", PLAIN) / "output", tmp_path / "output")
    )


# ---- as they were written ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_which_selects_the_newest_step_with_files_of_all_ranks(name):
    status, answer = call("which", FIXTURES / name / "output")
    files = steps_of(name)[newest_of(name)]
    assert status == 0 and answer["refused"] == []
    assert (answer["chosen"]["step"], answer["chosen"]["epoch"]) == (
        newest_of(name),
        EPOCHS.get(name, 2),
    )
    assert [os.path.relpath(path, FIXTURES / name) for path in answer["chosen"]["files"]] == files
    assert answer["chosen"]["format"] == files[0].rpartition(".")[2]


@pytest.mark.parametrize("name", NAMES)
def test_ls_and_verify_list_every_step_newest_first_without_checksums(name):
    status, answer = call("ls", FIXTURES / name)  # the folder of the run will do
    steps = steps_of(name)
    newest_first = sorted(steps, reverse=True)
    # on the number of ranks, which no manifest tells
    assert status == 0 and len(answer["notes"]) <= 1
    assert [row["step"] for row in answer["checkpoints"]] == newest_first
    for row in answer["checkpoints"]:
        assert (row["world_size"], row["origin"]) == (len(steps[row["step"]]), "mindformers")
        assert (row["usable"], row["problem"]) == (True, None)
    status, answer = call("verify", FIXTURES / name / "output" / "checkpoint")
    assert status == 0 and answer["damaged"] is False
    assert [(row["step"], row["state"]) for row in answer["checkpoints"]] == [
        (step, "unverifiable") for step in newest_first
    ]


@pytest.mark.parametrize("folder", ["mf180_10_ckpt_tp2"], indirect=True)
def test_graph_meta_is_not_a_checkpoint(folder):
    """mindformers 1.8.0 writes it beside the first checkpoint."""
    for rank in range(2):
        (folder / "checkpoint" / f"rank_{rank}" / f"llama_rank_{rank}-graph.meta").write_bytes(
            bytes(100)
        )
    status, answer = call("ls", folder)
    assert status == 0 and [row["step"] for row in answer["checkpoints"]] == [15, 10]


# ---- damaged -------------------------------------------------------------------------------------


# every rank holds moments of its own; in PLAIN 0 and 2, 1 and 3 hold the same
SHARDED = "mf190_10_ckpt_dp2tp2opt"


@pytest.mark.parametrize("folder", [SHARDED], indirect=True)
def test_a_step_is_refused_if_a_missing_file_held_unique_slices(folder):
    next((folder / "checkpoint" / "rank_2").glob("*-2_5.*")).unlink()
    status, answer = call("which", folder)
    assert status == 0 and (answer["chosen"]["step"], answer["chosen"]["missing_ranks"]) == (10, [])
    (refusal,) = answer["refused"]
    assert (refusal["step"], refusal["rank"]) == (15, 2) and "was held by rank 2 alone" in refusal[
        "reason"
    ]
    _, listed = call("ls", folder)
    assert [row["usable"] for row in listed["checkpoints"]] == [False, True]
    assert listed["checkpoints"][0]["problem"]["reason"] == refusal["reason"]
    status, report = call("verify", folder)
    assert status == 1 and [row["state"] for row in report["checkpoints"]] == [
        "damaged",
        "unverifiable",
    ]


@pytest.mark.parametrize("folder", [SHARDED], indirect=True)
def test_a_missing_rank_folder_is_detected_by_the_strategy_folder(folder):
    shutil.rmtree(folder / "checkpoint" / "rank_3")
    status, answer = call("which", folder)
    assert status == 3 and answer["chosen"] is None
    assert [(refusal["step"], refusal["rank"]) for refusal in answer["refused"]] == [
        (15, 3),
        (10, 3),
    ]
    assert all("no file of rank 3" in refusal["reason"] for refusal in answer["refused"])

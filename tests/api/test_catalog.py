"""A folder of checkpoints through the API: list, select, verify."""

import iteration_folders
import numpy as np
import pytest
from rank_folders import RUN, save, write_foreign, write_rank
from reshard.plans import put
from storages import failing

import mindresume
from mindresume.api.catalog import Catalog
from mindresume.errors import ConfigError, MissingCheckpointError


@pytest.fixture(params=["mindresume", "mindformers", "iterations", "iterations of mindformers"])
def saved(request, tmp_path):
    """Saves steps 10 and 15 below ``run/output/checkpoint``."""
    root = tmp_path / "run" / "output" / "checkpoint"
    if request.param == "iterations":
        iteration_folders.save(root, 10, 15)
    elif request.param == "iterations of mindformers":
        iteration_folders.foreign(root)
    else:
        for step in (10, 15):
            save(root, step, world=2) if request.param == "mindresume" else write_foreign(
                root, step, world=2
            )
    return root


# ---- listing -------------------------------------------------------------------------------------


def test_steps(saved):
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    catalog = mindresume.open(saved)
    assert catalog.steps() == (10, 15) == tuple(catalog) and len(catalog) == 2
    assert 10 in catalog and 11 not in catalog and "10" not in catalog
    assert catalog.latest().step == 15 and catalog[10].step == 10 == catalog[10].state.step
    assert len(catalog.list()) == 2 and catalog.select().chosen and not catalog.verify().damaged
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before


def test_a_step_number_means_the_complete_one_of_two_saves(tmp_path):
    save(tmp_path, 5, world=2)
    write_rank(tmp_path, 5, 0, 2, run="0002-0000bbbb", suffix=1)
    assert mindresume.open(tmp_path)[5].info.run_id == RUN


def test_a_single_file_can_be_opened(tmp_path):
    path = put(tmp_path / "one.safetensors", {"w": np.zeros((2, 3)), "step_num": np.array(7)})
    catalog = mindresume.open(path)
    assert catalog.steps() == (7,) and catalog[7].read("w").shape == (2, 3)
    assert catalog.select().chosen.step == 7


# ---- paths that are none -------------------------------------------------------------------------


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"x")
    catalog = mindresume.open(tmp_path)
    for call in (catalog.steps, catalog.list, catalog.latest, catalog.verify):
        with pytest.raises(MissingCheckpointError):
            call()
    found = catalog.select()
    assert found.chosen is None and not found.fresh and str(tmp_path) in found.error


def test_a_file_of_another_kind_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    # a CollectiveError of "rank 0" it was
    for ask in (Catalog.list, Catalog.steps, Catalog.select):
        with pytest.raises(ConfigError, match="notes.txt is no checkpoint"):
            ask(mindresume.open(tmp_path / "notes.txt"))


# ---- files that cannot be read now ---------------------------------------------------------------


@pytest.mark.parametrize(
    "iterations, name, at",
    [
        (False, "rank_1-", "open"),
        (False, "rank_1-", "status"),
        (False, "rank_00001.json", "open"),
        (False, "manifest.json", "open"),
        (True, "common.json", "open"),
        (True, "metadata.json", "open"),
        (True, "manifest.json", "open"),
        (True, "model-0000001", "open"),
    ],
)
def test_what_cannot_be_read_now_is_not_damaged(tmp_path, iterations, name, at):
    (iteration_folders.save if iterations else save)(tmp_path, 5)
    (found,) = Catalog(failing(name, at), str(tmp_path)).verify().checkpoints
    assert found.state == "unreadable" and "Stale" in found.problems[0].reason
    report = mindresume.open(tmp_path).verify()
    assert (report.damaged, report.unreadable) == (False, False)

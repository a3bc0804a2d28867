"""The command line on folders of both origins: what it prints for programs, and its exit status."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import iteration_folders
import pytest
from coordination.test_storage_topology import save_part
from iteration_folders import folder_of, foreign
from iteration_folders import save as save_iterations
from lease_holders import job_in
from memory_tiers import make_owned_tier
from rank_folders import damage, flip_bit, path_of, records_of, save, write_foreign, write_rank
from saving.memory_tier.test_tier import Training
from storages import Hooked

import mindresume
from mindresume.api import catalog as surveys

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["mindresume", "mindformers"])
def origin(request):
    return request.param


@pytest.fixture
def saved(tmp_path, origin):
    """Saves steps 5, 10, 15 of 4 ranks, below ``run/output/checkpoint``."""
    root = tmp_path / "run" / "output" / "checkpoint"
    for step in (5, 10, 15):
        save(root, step) if origin == "mindresume" else write_foreign(root, step)
    return root


def test_a_copy_of_an_iteration_is_listed_as_one(tmp_path, read):
    iteration_folders.save(tmp_path, 10, 20)
    shutil.copytree(
        iteration_folders.folder_of(tmp_path, 10), iteration_folders.folder_of(tmp_path, 11)
    )
    _, found = read("ls", tmp_path)
    assert {row["iteration_dir"]: row["usable"] for row in found["checkpoints"]} == {
        "iteration_00000020": True,
        "iteration_00000010": True,
        "iteration_00000011": False,
    }
    status, found = read("which", tmp_path)
    assert status == 0 and found["chosen"]["step"] == 20 and found["refused"] == []


def paths(root, step, world=4):
    return [str(path_of(root, step, rank)) for rank in range(world)]


def cut(root, step, rank):
    path = path_of(root, step, rank)
    os.truncate(path, path.stat().st_size - 1)
    return str(path)


# ---- which ---------------------------------------------------------------------------------------


def facts(row):
    return (
        row["step"],
        row["epoch"],
        row["format"],
        row["missing_ranks"],
        row["files"],
        row["warnings"],
    )


def test_which_prints_the_newest_one(saved, read):
    status, found = read("which", saved)
    assert (status, facts(found["chosen"]), found["refused"]) == (
        0,
        (15, 2, "safetensors", [], paths(saved, 15), []),
        [],
    )
    assert (found["root"], found["fresh"], found["verified"], found["local"], found["error"]) == (
        str(saved),
        False,
        True,
        None,
        "",
    )


def test_which_gives_the_reason_for_refusing_a_newer_one(saved, read):
    path = cut(saved, 15, 2)
    status, found = read("which", saved)
    assert (status, facts(found["chosen"])) == (0, (10, 1, "safetensors", [], paths(saved, 10), []))
    assert set(found) == {
        "root",
        "chosen",
        "refused",
        "notes",
        "fresh",
        "verified",
        "description",
        "local",
        "error",
        "source",
    }
    (refusal,) = found["refused"]
    assert set(refusal) == {"step", "reason", "file", "rank", "tensors"}
    assert (refusal["step"], refusal["file"], refusal["rank"]) == (15, path, 2)


def test_which_names_the_damaged_tensor(tmp_path, read):
    for step in (5, 10):
        save(tmp_path, step)
    path = damage(tmp_path, 10, 1, "layer.bias")
    status, found = read("which", tmp_path)
    assert status == 0 and found["chosen"]["step"] == 5
    assert (
        found["refused"][0]["file"] == path
        and "damaged: layer.bias" in found["refused"][0]["reason"]
    )
    quick = read("which", tmp_path, "--quick")[1]
    assert quick["chosen"]["step"] == 10 and not quick["verified"]


def test_which_reports_that_no_checkpoint_is_usable(saved, read):
    for step in (5, 10, 15):
        cut(saved, step, 0)
    status, found = read("which", saved)
    assert status == 3 and found["chosen"] is None
    assert [(r["step"], r["rank"]) for r in found["refused"]] == [(15, 0), (10, 0), (5, 0)]


def test_which_reports_a_fresh_start_in_an_empty_folder(tmp_path, read):
    status, found = read("which", tmp_path)
    assert (status, found["chosen"], found["refused"], found["fresh"]) == (3, None, [], True)


def test_which_accepts_a_name(saved, read):
    for name in ("net_rank_0-1_10.safetensors", "net_rank_3-1_10"):
        status, found = read("which", saved, "--name", name)
        assert status == 0 and found["chosen"]["step"] == 10
    cut(saved, 10, 1)
    status, found = read("which", saved, "--name", "net_rank_0-1_10")
    assert status == 3 and found["chosen"] is None


def test_which_refuses_a_name_that_does_not_exist(saved, call):
    status, out, _ = call("which", saved, "--name", "net_rank_0-9_9")
    assert status == 3 and "net_rank_0-9_9" in out and "net_rank_0-1_10.safetensors" in out


def test_which_accepts_a_file_or_a_rank_folder(saved, read):
    assert read("which", path_of(saved, 10, 2))[1]["chosen"]["step"] == 10
    assert read("which", saved / "rank_3")[1]["chosen"]["step"] == 15


def test_which_refuses_a_torn_file_outside_rank_folders(tmp_path, read, call):
    path = tmp_path / "single.safetensors"
    path.write_bytes(b"x" * 20)
    status, found = read("which", path)
    assert (status, found["chosen"]) == (3, None) and found["refused"][0]["file"] == str(path)
    status, out, _ = call("which", path)
    assert "truncated, or not a safetensors file" in out


@pytest.mark.parametrize("command", ["ls", "which", "verify"])
@pytest.mark.parametrize("above", [1, 2])
def test_folders_above_are_accepted(saved, read, command, above):
    folder = saved.parents[above - 1]
    status, found = read(command, folder)
    assert status == 0
    if command == "which":
        assert found["chosen"]["files"] == paths(saved, 15)
    else:
        assert found["root"] == str(saved) and len(found["checkpoints"]) == 3


def test_all_commands_report_torn_metadata_of_mindformers(tmp_path, read, call):
    foreign(tmp_path, steps=(10, 15))
    os.truncate(folder_of(tmp_path, 15) / "metadata.json", 100)
    status, found = read("which", tmp_path)
    reason = found["refused"][0]["reason"]
    assert (status, found["chosen"]["step"]) == (0, 10) and reason.startswith("metadata.json: ")
    rows = read("ls", tmp_path)[1]["checkpoints"]
    assert rows[0]["problem"]["reason"] == reason and rows[1]["problem"] is None
    status, found = read("verify", tmp_path)
    assert status == 1 and [
        [problem["reason"] for problem in row["problems"]] for row in found["checkpoints"]
    ] == [[reason], []]
    assert reason in call("inspect", tmp_path)[1]


def said_of(step, read, call, root):
    """Returns the output of `ls`, `which` and `verify`: (warnings, warnings of the selected one,
    problems), and all printed text."""
    (listed,) = [
        row["warnings"] for row in read("ls", root)[1]["checkpoints"] if row["step"] == step
    ]
    chosen = read("which", root)[1]["chosen"]
    status, found = read("verify", root)
    (problems,) = [
        [problem["reason"] for problem in row["problems"]]
        for row in found["checkpoints"]
        if row["step"] == step
    ]
    assert chosen["step"] == step and (status, found["damaged"]) == (
        (1, True) if problems else (0, False)
    )
    printed = [call(command, root)[1].replace("\n", "") for command in ("ls", "which", "verify")]
    return (listed, chosen["warnings"], problems), printed


@pytest.mark.parametrize("ranks", [(2,), (0, 3)])
def test_all_commands_report_ranks_rebuilt_from_replicas(tmp_path, read, call, ranks):
    save(tmp_path, 5)
    for rank in ranks:
        path_of(tmp_path, 5, rank).unlink()
    (listed, chosen, problems), printed = said_of(5, read, call, tmp_path)
    assert listed == chosen and len(chosen) == 1 and len(problems) == len(ranks)
    assert (
        f"the file of rank {', '.join(map(str, ranks))} is missing (rank_{ranks[0]}/" in chosen[0]
    )
    assert all("other ranks hold every tensor of it" in text for text in printed)


@pytest.mark.parametrize("iterations", [False, True])
@pytest.mark.parametrize("harm", ["altered", "empty", "removed"])
def test_all_commands_report_a_damaged_manifest(tmp_path, read, call, iterations, harm):
    save_iterations(tmp_path, 5) if iterations else save(tmp_path, 5)
    (path,) = tmp_path.rglob("manifest.json")
    path.write_bytes(
        b"" if harm == "empty" else path.read_bytes().replace(b'"part"', b'"x"').replace(b"0", b"1")
    )
    if harm == "removed":
        path.unlink()
    (listed, chosen, problems), printed = said_of(5, read, call, tmp_path)
    if harm == "removed" and not iterations:  # rank 0 had not committed it yet
        assert (listed, chosen, problems) == ([], [], [])
        return
    assert (
        listed == chosen == problems
        and len(problems) == 1
        and problems[0].startswith("manifest.json of step 5: ")
    )
    assert all("manifest.json of step 5" in text for text in printed)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize(
    "name, change",
    [
        ("common.json", lambda data: data.replace(b'"step_num": 5', b'"step_num": 6')),
        ("common.json", lambda data: data[:-9]),
        ("metadata.json", lambda data: data[:-9]),
        ("metadata.json", lambda data: data.replace(b"float32", b"int32")),
        ("metadata.json", lambda data: b""),
    ],
)
def test_changed_metadata_files_are_found_by_all_commands(
    tmp_path, read, call, manifest, name, change
):
    save_iterations(tmp_path, 5)
    path = folder_of(tmp_path, 5) / name
    assert change(path.read_bytes()) != path.read_bytes()
    path.write_bytes(change(path.read_bytes()))
    if not manifest:
        next(tmp_path.rglob("manifest.json")).write_bytes(b"torn")
    (_, chosen, problems), _ = said_of(5, read, call, tmp_path)
    assert chosen == problems and len(problems) == (1 if manifest else 2) and name in problems[-1]


def test_which_ls_and_verify_refuse_a_folder_of_something_else(tmp_path, call, read):
    (tmp_path / "data.bin").write_bytes(b"x")
    for command, status in (("which", 3), ("ls", 2), ("verify", 2)):
        found = call(command, tmp_path)
        assert found[0] == status and "is not a checkpoint directory: " in found[1] + found[2], (
            command
        )
    save(tmp_path / "a", 5)
    save(tmp_path / "b", 5)
    for command, status in (("which", 3), ("ls", 2), ("verify", 2)):
        found = call(command, tmp_path)
        assert found[0] == status and "several folders below do: " in found[1] + found[2], command
    assert "several folders below do: " in read("which", tmp_path)[1]["error"]


def test_world_size(saved, read, origin):
    assert read("which", saved, "--world-size", 4)[0] == 0
    status, found = read("which", saved, "--world-size", 2)
    assert status == 3 and [refusal["step"] for refusal in found["refused"]] == [15, 10, 5]
    assert all("this job has 2" in refusal["reason"] for refusal in found["refused"])
    status, found = read("which", saved, "--world-size", 8)
    assert status == 3 and len(found["refused"]) == 3


def test_a_missing_rank_of_mindformers_needs_the_number_of_ranks(tmp_path, read, call):
    write_foreign(tmp_path, 5)
    write_foreign(tmp_path, 10, ranks=[0, 1, 2])
    # four rank folders: four ranks are assumed
    assert read("which", tmp_path)[1]["chosen"]["step"] == 5
    assert "4 ranks assumed from the number of rank folders" in call("which", tmp_path)[1]
    shutil.rmtree(tmp_path / "rank_3")
    assert read("which", tmp_path)[1]["chosen"]["step"] == 10
    assert read("which", tmp_path, "--world-size", 4)[0] == 3


def test_which_prints_a_text_by_default(saved, call, origin):
    cut(saved, 15, 2)
    status, out, err = call("which", saved)
    assert status == 0 and err == ""
    assert (
        "step 15" in out
        and "step 10" in out
        and str(path_of(saved, 15, 2)) in out.replace("\n", "")
    )
    assert ("written by mindformers" in out) is (origin == "mindformers")


# ---- verify --------------------------------------------------------------------------------------


def test_verify_accepts_complete_checkpoints(saved, read, origin):
    status, found = read("verify", saved)
    assert status == 0 and found["damaged"] is False
    assert [(row["step"], row["origin"], row["problems"]) for row in found["checkpoints"]] == [
        (15, origin, []),
        (10, origin, []),
        (5, origin, []),
    ]
    assert {row["state"] for row in found["checkpoints"]} == {
        "verified" if origin == "mindresume" else "unverifiable"
    }
    if origin == "mindresume":
        assert found["bytes_read"] == sum(
            os.path.getsize(path) for step in (5, 10, 15) for path in paths(saved, step)
        )


def test_verify_names_every_damaged_file_and_tensor(tmp_path, read, call):
    for step in (5, 10):
        save(tmp_path, step)
    expected = {
        damage(tmp_path, 10, 1, "layer.bias"): "layer.bias",
        damage(tmp_path, 10, 3, "adam_m.embedding.weight"): "adam_m.embedding.weight",
    }
    status, found = read("verify", tmp_path)
    assert status == 1 and found["damaged"] is True
    newest, older = found["checkpoints"]
    assert (newest["state"], older["state"]) == ("damaged", "verified")
    assert {
        problem["file"]: problem["reason"].partition("damaged: ")[2].split()[0]
        for problem in newest["problems"]
    } == expected
    out = call("verify", tmp_path)[1].replace("\n", "")
    assert "DAMAGED" in out and all(
        path in out and tensor in out for path, tensor in expected.items()
    )


@pytest.mark.parametrize(
    "spoil", [cut, lambda root, step, rank: path_of(root, step, rank).write_bytes(b"")]
)
def test_verify_of_a_file_cut_short(saved, read, spoil):
    spoil(saved, 10, 2)
    status, found = read("verify", saved)
    assert status == 1 and [row["state"] == "damaged" for row in found["checkpoints"]] == [
        False,
        True,
        False,
    ]
    assert found["checkpoints"][1]["problems"][0]["file"] == str(path_of(saved, 10, 2))


def test_verify_of_one_step(saved, read):
    cut(saved, 15, 0)
    assert read("verify", saved, "--step", 10)[0] == 0
    assert read("verify", saved, "--step", 15)[0] == 1


def test_verify_of_a_deleted_file_without_replicas(tmp_path, read):
    save(tmp_path, 5, replicas=4)
    path_of(tmp_path, 5, 1).unlink()
    status, found = read("verify", tmp_path)
    assert status == 1 and found["checkpoints"][0]["problems"][0]["file"] == str(
        path_of(tmp_path, 5, 1)
    )


def test_verify_of_a_deleted_file_with_replicas(tmp_path, call):
    save(tmp_path, 10)
    path_of(tmp_path, 10, 1).unlink()
    status, out, _ = call("verify", tmp_path)
    assert (
        status == 1
        and "DAMAGED, but a resume takes it" in out
        and "rank_1/net_rank_1-1_10.safetensors" in out
    )
    path_of(tmp_path, 10, 0).unlink()
    path_of(tmp_path, 10, 2).unlink()
    path_of(tmp_path, 10, 3).unlink()
    assert "but a resume" not in call("verify", tmp_path)[1]


def test_verify_of_one_that_is_removed_while_it_is_read(tmp_path, read, call, monkeypatch):
    for step in (5, 10):
        save(tmp_path, step)

    def late(operation, path):
        if (
            operation == "open"
            and path == str(path_of(tmp_path, 10, 0))
            and path_of(tmp_path, 5, 0).exists()
        ):
            for path in paths(tmp_path, 5):
                os.remove(path)
            shutil.rmtree(records_of(tmp_path, 5))

    monkeypatch.setattr(surveys, "PosixStorage", lambda: Hooked(late))
    status, found = read("verify", tmp_path)
    assert (
        status == 0
        and found["removed_steps"] == [5]
        and [row["step"] for row in found["checkpoints"]] == [10]
    )
    save(tmp_path, 5)
    assert "step 5: was removed while it was read" in call("verify", tmp_path)[1]


def test_an_incomplete_save_is_not_damage(tmp_path, read, call):
    save(tmp_path, 5)
    write_rank(tmp_path, 10, 0, 4)
    status, found = read("verify", tmp_path)
    assert status == 0 and [row["state"] for row in found["checkpoints"]] == [
        "incomplete",
        "verified",
    ]
    assert "the save never completed" in call("verify", tmp_path)[1]


def test_verify_of_a_damaged_record(tmp_path, read):
    save(tmp_path, 5)
    flip_bit(records_of(tmp_path, 5) / "rank_00002.json", -10)
    status, found = read("verify", tmp_path)
    (problem,) = found["checkpoints"][0]["problems"]
    assert (
        status == 1
        and "rank 2" in problem["reason"]
        and "list of tensors is truncated or altered" in problem["reason"]
    )


# ---- ls ------------------------------------------------------------------------------------------


def test_ls(saved, read, origin):
    cut(saved, 15, 2)
    status, found = read("ls", saved)
    assert status == 0 and found["root"] == str(saved)
    rows = found["checkpoints"]
    assert [(row["step"], row["epoch"], row["world_size"], row["origin"]) for row in rows] == [
        (15, 2, 4, origin),
        (10, 1, 4, origin),
        (5, 1, 4, origin),
    ]
    assert [row["usable"] for row in rows] == (
        [False, True, True] if origin == "mindresume" else [True, True, True]
    )
    assert set(rows[0]) == {
        "step",
        "epoch",
        "state",
        "problem",
        "warnings",
        "format",
        "iteration_dir",
        "origin",
        "run_id",
        "committed",
        "world_size",
        "missing_ranks",
        "local_ranks",
        "saved_at",
        "size_bytes",
        "files",
        "usable",
    }
    assert rows[1]["files"] == paths(saved, 10) and rows[1]["committed"] is (origin == "mindresume")


def test_ls_prints_a_table_by_default(saved, call):
    status, out, err = call("ls", saved)
    assert (
        status == 0
        and err == ""
        and all(text in out for text in ("step", "15", "10", "safetensors", "complete"))
    )


def test_ls_of_an_empty_folder(tmp_path, call, read):
    assert call("ls", tmp_path) == (0, f"{tmp_path}: no checkpoints\n", "")
    assert read("ls", tmp_path) == (
        0,
        {"root": str(tmp_path), "checkpoints": [], "notes": [], "in_use_by": [], "memory": []},
    )


# ---- errors and imports --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_that_does_not_exist(tmp_path, call, command):
    status, out, err = call(command, tmp_path / "missing")
    assert (status, out) == (2, "") and err == f"mindresume: {tmp_path}/missing does not exist\n"


def test_which_reports_a_fresh_start_if_the_folder_does_not_exist(tmp_path, call, read):
    status, found = read("which", tmp_path / "missing")
    assert (status, found["chosen"], found["refused"], found["fresh"]) == (3, None, [], True)
    assert "a resume starts afresh" in call("which", tmp_path / "missing")[1]


@pytest.mark.parametrize(
    "arguments",
    [["which"], ["nonsense"], ["which", ".", "--world-size", "0"], ["ls", ".", "--jsn"]],
)
def test_wrong_arguments(call, arguments):
    assert call(*arguments)[0] == 2


def test_a_file_of_another_kind(tmp_path, call):
    (tmp_path / "notes.txt").write_text("text")
    status, _, err = call("which", tmp_path / "notes.txt")
    assert status == 2 and "notes.txt is no checkpoint" in err


@pytest.mark.parametrize("command", ["ls", "which", "verify"])
def test_nothing_is_changed(saved, call, command):
    cut(saved, 15, 0)
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    call(command, saved)
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert len(mindresume.open(saved).list()) == 3


def test_plugin_path_is_the_folder_of_the_shim(call):
    status, out, _ = call("plugin-path")
    assert status == 0 and sorted(p.name for p in Path(out.strip()).glob("*.py")) == [
        "mindresume_plugin.py"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import mindresume",
        "from mindresume import cli; import sys; "
        "sys.argv = ['mindresume', 'which', '.', '--json']\n"
        "try: cli.main()\nexcept SystemExit: pass",
        "from mindresume import cli; import sys; sys.argv = ['mindresume', 'verify', '.']\n"
        "try: cli.main()\nexcept SystemExit: pass",
    ],
)
def test_no_framework_is_imported(tmp_path, code):
    save(tmp_path, 5, world=1)
    check = (
        "\nimport sys; print('LOADED', sorted({name.split('.')[0] for name in sys.modules} & "
        "{'mindspore', 'mindformers', 'torch', 'transformers', 'tensorflow', 'safetensors'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + check],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout.rstrip().endswith("LOADED []"), (
        done.stdout + done.stderr
    )


def test_python_m_mindresume(tmp_path):
    save(tmp_path, 5, world=2)
    done = subprocess.run(
        [sys.executable, "-m", "mindresume", "which", str(tmp_path), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (
        done.returncode == 0
        and json.loads(done.stdout)["chosen"]["files"] == paths(tmp_path, 5, 2)
        and done.stderr == ""
    )


def test_ls_names_the_job_that_saves_there(tmp_path, call, read):
    save(tmp_path, 5, 1)
    lease = job_in(tmp_path)
    out = call("ls", tmp_path)[1]
    assert (
        f"saving: run {lease.run} on host" in out
        and f"(process {os.getpid()}, 8 ranks" in out
        and "; alive" in out
    )
    (holder,) = read("ls", tmp_path)[1]["in_use_by"]
    assert holder["run"] == lease.run and holder["alive"] is True
    lease.release()
    assert read("ls", tmp_path)[1]["in_use_by"] == []


def test_which_selects_the_emergency_save_of_a_mindformers_job(tmp_path, read):
    """Proven by the strategy folder beside, as a training does it."""
    from resume.test_missing_ranks import COVERING, WORLD, foreign, strategy_in

    root = tmp_path / "checkpoint"
    foreign(root, 5, range(WORLD))
    foreign(root, 7, COVERING)
    assert read("which", root)[1]["chosen"]["step"] == 5
    strategy_in(tmp_path / "strategy")
    assert read("which", root)[1]["chosen"]["step"] == 7


def test_commands_report_the_part_of_one_node(tmp_path, call):
    """Without shared storage each command reports the part of this node, and that the job asks all
    nodes."""
    for step in (5, 10):
        save_part(tmp_path, step, (2, 3))
    status, out, _ = call("which", tmp_path)
    assert (
        status == 0
        and out.startswith("part     step 10, epoch 1: rank 2, 3 of 4")
        and "refused" not in out
    )
    status, out, _ = call("which", tmp_path, "--json")
    assert json.loads(out)["local"]["local_ranks"] == [2, 3] and json.loads(out)["chosen"] is None
    assert call("ls", tmp_path)[1].count("node-local") == 2
    status, out, _ = call("verify", tmp_path)
    assert status == 0 and out.count("every byte of rank 2, 3 of 4") == 2
    path_of(tmp_path, 10, 3).unlink()
    status, out, _ = call("verify", tmp_path)
    assert (
        status == 1
        and "the file of rank 3 is missing, and" in out
        and "Errno" not in out
        and "rank_00000" not in out
    )
    assert call("which", tmp_path)[1].splitlines()[-1].startswith("part     step 5, epoch 1")
    assert "unusable" in call("ls", tmp_path)[1]
    flip_bit(path_of(tmp_path, 5, 2))
    assert call("which", tmp_path)[0] == 3


def test_verify_of_an_empty_folder(tmp_path, call):
    assert call("verify", tmp_path)[0] == 3
    status, _, err = call("verify", tmp_path, "--step", "7")
    assert status == 2 and err.endswith(" has no step 7; there is no checkpoint\n")


def test_the_version_names_what_a_report_of_a_defect_needs(call):
    status, out, err = call("--version")
    assert (status, err) == (0, "")
    assert out == (
        f"mindresume {mindresume.__version__} (mindformers {version('mindformers')}, "
        f"mindspore {version('mindspore')}, Python {platform.python_version()})\n"
    )


@pytest.mark.parametrize("columns", ["40", "80"])
def test_nothing_is_cut_in_a_file_or_a_pipe(saved, call, monkeypatch, columns):
    """A program, or a grep, reads the state behind all other columns."""
    before = call("ls", saved)[1]
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = call("ls", saved)
    assert status == 0 and out == before and "…" not in out and out.count("complete") >= 3


def test_a_step_in_memory_that_is_on_disk_too_is_not_lost_with_the_node(tmp_path, memory, call):
    """And there is nothing to flush."""
    root = tmp_path / "checkpoint"
    Training(make_owned_tier(memory, root), 1).steps(8).stop()
    assert "is lost with it" in call("which", root)[1]
    assert call("flush", root)[0] == 0
    _, out, _ = call("which", root)
    assert "is lost with it" not in out

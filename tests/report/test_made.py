"""A folder becomes one report: which ranks are read, what is said about them, and the JSON document."""
import json
import os

from folders import STORAGE, save, write_rank
from logfiles import RUNS, Log, two_lives

from mindresume.report.made import make, to_json

PIPELINE = "pipeline stages: 2 > 1, the loss on the last card is valid."


def made(folder, *more):
    return make(STORAGE, str(folder), str(folder / "checkpoint"), list(map(str, more)))


def info(folder, rank, log, name="log"):
    return log.write(folder / name / f"rank_{rank}" / "info.log")


def pipeline(at, first, last, value):
    log = Log().start(at).line(at + 1, PIPELINE, "WARNING")
    for step in range(first, last + 1):
        log.loss(at + 5 + step - first, step, value)
    return log


def test_the_log_of_one_rank_counts_once(tmp_path):
    for rank in range(4):
        info(tmp_path, rank, two_lives())
        two_lives(printed=True).write(tmp_path / "msrun_log" / f"worker_{rank}.log")
    report = made(tmp_path)
    assert (report.rank, report.loss_rank, len(report.lives), report.steps_done, report.steps_lost) == (0, None, 2, 13, 3)
    assert len(report.read) == 2 and report.notes == ()


def test_starts_with_logs_of_their_own_are_one_history(tmp_path):
    lines = two_lives().lines
    cut = next(index for index, line in enumerate(lines[1:], 1) if "Init Config" in line)
    for name, part in (("log_first", lines[:cut]), ("log_second", lines[cut:])):
        log = Log()
        log.lines = part
        info(tmp_path, 0, log, name)
    whole = tmp_path / "whole"
    info(whole, 0, two_lives())
    ours, theirs = to_json(made(tmp_path)), to_json(made(whole))
    assert ours["lives"] == theirs["lives"] and ours["seconds"] == theirs["seconds"]


def test_the_loss_of_the_last_stage(tmp_path):
    info(tmp_path, 0, pipeline(0, 1, 5, 0.5))
    info(tmp_path, 3, pipeline(0, 1, 5, 6.0))
    report = made(tmp_path)
    assert report.loss_rank == 3 and list(report.lives[0].losses.values) == [6.0] * 5
    assert len(report.read) == 2 and "the loss is that of rank 3" in report.notes[0]


def test_the_last_stage_of_each_life_if_the_number_of_ranks_changed(tmp_path):
    both = pipeline(0, 1, 5, 0.5)
    both.lines += pipeline(50, 4, 8, 0.5).lines
    info(tmp_path, 0, both)
    info(tmp_path, 3, pipeline(0, 1, 5, 6.0))
    info(tmp_path, 2, pipeline(0, 1, 5, 7.0))
    info(tmp_path, 1, pipeline(50, 4, 8, 5.0))
    report = made(tmp_path)
    assert [set(life.losses.values) for life in report.lives] == [{6.0}, {5.0}] and report.loss_rank == 3


def test_without_the_log_of_the_last_stage_it_is_said(tmp_path):
    info(tmp_path, 0, pipeline(0, 1, 5, 0.5))
    assert "not the true one" in made(tmp_path).notes[0]


def test_without_the_log_of_rank_0_another_one_tells(tmp_path):
    info(tmp_path, 2, two_lives())
    report = made(tmp_path)
    assert report.rank == 2 and "no log of rank 0" in report.notes[0] and report.steps_lost == 3


def test_what_is_missing_or_odd_is_said(tmp_path):
    log = Log().loss(1, 1000).loss(2, 1010).loss(3, 1020, "nan")
    log.ours(9, "continues after step 17 (epoch 3 done), global batch size 16, loss scale 1.0; steps scaled by 0.5 from 35")
    info(tmp_path, 0, log)
    notes = " ".join(made(tmp_path).notes)
    for words in ("begins in the middle", "every 10 steps", "up to 9 steps more", "not finite", "The batch size changed"):
        assert words in notes


def test_a_worker_tells_why_the_last_life_died(tmp_path):
    info(tmp_path, 0, Log().start(0).fresh(1).run(2, RUNS[0]).steps(3, 1, 4))
    for rank, at, words in ((1, 9, "failed on rank 1: AgreementError: gone"), (2, 8, "failed on rank 2: SaveError: full")):
        path = Log(True).start(0).line(at, "x").write(tmp_path / "msrun_log" / f"worker_{rank}.log")
        with open(path, "a") as file:
            file.write(f"run_mindformer.py: {words}\n")
    life, = made(tmp_path).lives
    assert (life.end, life.why) == ("died", "failed on rank 2: SaveError: full")


def test_words_of_an_earlier_start_are_not_those_of_the_last(tmp_path):
    info(tmp_path, 0, Log().start(100).fresh(101).run(102, RUNS[0]).steps(103, 1, 4))
    path = Log(True).start(0).line(9, "x").write(tmp_path / "msrun_log" / "worker_0.log")
    with open(path, "a") as file:
        file.write("run_mindformer.py: failed: OSError\n")
    assert [life.why for life in made(tmp_path).lives][-1] == ""


def test_steps_that_the_next_start_would_do_again(tmp_path):
    save(tmp_path / "checkpoint", 5, world=1)
    info(tmp_path, 0, Log().start(0).fresh(1).run(2, RUNS[0]).steps(3, 1, 8))
    report = made(tmp_path)
    assert (report.not_safe, report.lives[-1].end, report.steps_lost) == (3, "died", 0)
    report = make(STORAGE, str(tmp_path), str(tmp_path / "gone"))               # nobody knows what there is
    assert (report.not_safe, report.lives[-1].end) == (None, "unknown")


def test_checkpoints_are_those_of_ls(tmp_path):
    root = tmp_path / "checkpoint"
    save(root, 5)
    save(root, 10)
    os.truncate(next((root / "rank_2").glob("*-1_10.*")), 9)
    write_rank(root, 15, 0, 4)
    rows = made(tmp_path).disk.checkpoints
    assert [(row.step, row.state, row.committed, row.ranks) for row in rows] == [
        (15, "incomplete", False, 4), (10, "unusable", True, 4), (5, "complete", True, 4)]
    assert "rank 2" in rows[1].reason and rows[2].reason == "" and rows[2].size > 1000


def test_the_document_is_json_without_odd_numbers(tmp_path):
    info(tmp_path, 0, Log().start(0).loss(4, 1, "nan").loss(5, 2, "inf"))
    save(tmp_path / "checkpoint", 5)
    text = json.dumps(to_json(made(tmp_path)), allow_nan=False)
    document = json.loads(text)
    assert document["lives"][0]["loss"] == {"first": None, "last": None}
    assert set(document) == {"output", "root", "logs", "steps", "seconds", "lives", "checkpoints", "notes"}


def test_nothing_there(tmp_path):
    report = made(tmp_path, tmp_path / "more")
    assert (report.rank, report.lives, report.reached, report.not_safe, report.steps_lost) == (None, (), None, None, 0)
    assert len(to_json(report)["logs"]["looked_for"]) == 4

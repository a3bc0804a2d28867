"""``mindresume ls --watch``: what changed, the speed, the next save; a disk that hangs; the screen and the lines. Nothing here
waits: each pause of the loop is the next event of a job."""
import errno
import io
import json
import threading
import time
from dataclasses import replace

import pytest
from lease_holders import ELSEWHERE, ME, publish_lease
from rank_folders import RUN, path_of, save, write_foreign, write_rank
from rich.console import Console

import mindresume
from mindresume import runtime
from mindresume.api.observation import Heartbeat, Observation, observe
from mindresume.api.results import CheckpointInfo, DirectoryUser, Listing
from mindresume.cli import watch
from mindresume.cli.common import Stopped
from mindresume.cli.watch import BoundedLook, Failure, History, Lines, Look, changes_between
from mindresume.cli.watch_screen import Screen, frame
from mindresume.errors import ConfigError

COMMAND = "ls"
JOB = replace(ME, run=RUN, since=1000.0)
USERS = (DirectoryUser(JOB, True),)


@pytest.fixture(autouse=True)
def looks_take_no_time(monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 600.0)


def info(step, state="complete", committed=True, run=RUN, size=1 << 30, at=1000.0, **fields):
    return CheckpointInfo(**{**dict(step=step, epoch=1, state=state, problem=None, warnings=(), format="safetensors",
                                    iteration_dir=None, origin="mindresume", run_id=run, committed=committed, world_size=4,
                                    missing_ranks=(), local_ranks=(), saved_at=at, size_bytes=size, files=()), **fields})


def listing(*rows, users=USERS, **fields):
    return Listing("/ckpt", rows, in_use_by=tuple(users), **fields)


def observation(*rows, beat=(1, 0, 0.0), **fields):
    count, step, at = beat
    return Observation(listing(*rows, **fields), (), (Heartbeat(RUN, count, step, 15.0, at),), 10 << 30)


def kinds(before, after):
    return [(change.kind, change.step) for change in changes_between(before, after)]


def seen(*found):
    """Returns the history of looks, one each 10 s, the first one at 1000."""
    history = History()
    for number, value in enumerate(found):
        history.take(None if value == "hangs" else Look(value, 1000.0 + 10 * number, 0.0), 1000.0 + 10 * number)
    return history


def events(*steps):
    """Returns a wait that does the next of ``steps``, and then ends the loop as Ctrl-C does."""
    left = iter(steps)

    def wait(seconds):
        step = next(left, None)
        if step is None:
            raise Stopped(2)
        step()
    return wait


def run(folder, view, *steps):
    """Watches a folder at the time 1000. Each wait does the next of ``steps``."""
    with runtime.answers({runtime.time: lambda: 1000.0, runtime.sleep: events(*steps)}), pytest.raises(Stopped):
        watch.watch(str(folder), view)


def watched(folder, view, world_size, pause):
    """Stands in for ``watch.watch``: one look, then Ctrl-C."""
    view.show(seen(observe(folder, world_size)), 1000.0, True)
    raise Stopped(2)


@pytest.fixture
def looks(monkeypatch):
    """looks(look): makes ``look`` what a look does, at the time 5."""
    def made(look):
        monkeypatch.setattr(watch, "observe", lambda folder, world_size: look())
        return BoundedLook("/ckpt")
    with runtime.answers({runtime.time: lambda: 5.0}):
        yield made


# ---- changes ---------------------------------------------------------------------------------------------------------

def test_changes_of_a_checkpoint():
    saving, written = info(20, "incomplete", committed=False), info(20, committed=False)
    assert kinds(listing(), listing(saving)) == [("new", 20)]
    assert kinds(listing(saving), listing(written)) == [("completed", 20)]
    assert kinds(listing(written), listing(info(20))) == kinds(listing(saving), listing(info(20))) == [("committed", 20)]
    assert kinds(listing(info(20)), listing(info(20, "unusable"))) == [("changed", 20)]
    assert kinds(listing(info(20), info(10)), listing(info(20))) == [("removed", 10)]
    assert kinds(listing(info(20)), None) == [("removed", 20), ("job", None)]


def test_more_bytes_of_a_save_are_no_change():
    assert kinds(listing(info(20, "incomplete", False, size=1)), listing(info(20, "incomplete", False, size=2))) == []


def test_publishing_an_iteration_does_not_make_it_another_checkpoint():
    hidden = info(20, "incomplete", False, iteration_dir=".mindresume/step-20")
    assert kinds(listing(hidden), listing(info(20, iteration_dir="iteration_00000020"))) == [("committed", 20)]


def test_the_same_step_of_another_run_and_in_memory_are_other_checkpoints():
    later = info(20, run="0002-0000bbbb")
    assert kinds(listing(info(20)), listing(later, info(20))) == [("new", 20)]
    (change,) = changes_between(listing(info(20)), listing(info(20), memory=(info(20),)))
    assert change.kind == "new" and "in memory" in change.text


def test_changes_of_the_users_of_the_folder():
    alive, dead = DirectoryUser(JOB, True), DirectoryUser(JOB, False)
    assert kinds(listing(users=[alive]), listing(users=[alive])) == []
    assert kinds(listing(users=[alive]), listing(users=[replace(alive, holder=replace(JOB, beat=9, step=7))])) == []
    assert kinds(listing(users=[]), listing(users=[alive])) == kinds(listing(users=[alive]), listing(users=[])) == [("job", None)]
    assert kinds(listing(users=[alive]), listing(users=[dead])) == [("job", None)]
    assert kinds(listing(), listing(notes=("a note",))) == [("notes", None)]


# ---- speed and the next save -----------------------------------------------------------------------------------------

def test_the_speed_is_that_between_heartbeats_by_the_clock_of_their_files():
    assert seen(observation(beat=(1, 100, 50.0))).speed(RUN) is None
    assert seen(observation(beat=(1, 100, 50.0)), observation(beat=(2, 130, 65.0))).speed(RUN) == 2.0
    assert seen(observation(beat=(1, 100, 50.0)), observation(beat=(1, 100, 50.0))).speed(RUN) is None
    assert seen(observation(beat=(1, 0, 50.0)), observation(beat=(2, 130, 65.0))).speed(RUN) is None     # the first step unknown


def test_a_heartbeat_that_could_not_be_read_once_does_not_end_the_speed():
    """``observe`` leaves it out if the job writes it at that moment."""
    unread = Observation(listing(info(20)))
    assert seen(observation(beat=(1, 100, 50.0)), unread, observation(beat=(2, 130, 65.0))).speed(RUN) == 2.0
    assert seen(observation(beat=(1, 100, 50.0)), Observation(listing(users=[]))).heartbeat(RUN) is None


def test_the_speed_forgets_what_was_long_ago():
    beats = [observation(beat=(number, 10 * number if number < 5 else 40 + 100 * (number - 4), 10.0 * number))
             for number in range(1, 20)]
    assert seen(*beats).speed(RUN) == 10.0


def test_the_next_save_follows_from_the_distance_of_the_last_ones():
    rows = info(60), info(40), info(20)
    history = seen(observation(*rows, beat=(1, 61, 50.0)), observation(*rows, beat=(2, 70, 54.5)))
    assert history.save_interval(RUN) == 20
    assert history.next_save(RUN, 1012.0) == (80, 3.0)                      # 10 steps at 2/s, seen 2 s ago
    assert seen(observation(*rows)).next_save(RUN, 1000.0) == (80, None)


def test_no_next_save_is_given_where_the_distances_differ_or_are_unknown():
    assert seen(observation(info(60), info(50), info(20))).next_save(RUN, 1000.0) is None
    assert seen(observation(info(20))).next_save(RUN, 1000.0) is None
    assert seen(observation()).next_save(RUN, 1000.0) is None


def test_days_of_watching_take_no_more_memory():
    history = seen(*(observation(info(step, run=run)) for run in (RUN, "0002-0000bbbb") for step in range(20, 2000, 20)))
    assert history.save_interval("0002-0000bbbb") == 20 and sum(map(len, history._complete.values())) <= 8


def test_a_removed_checkpoint_still_tells_the_interval():
    assert seen(observation(info(20)), observation(info(40))).save_interval(RUN) == 20


# ---- what happens to the folder and the disk -------------------------------------------------------------------------

def test_a_folder_may_come_later_and_go_again():
    history = seen(None)
    assert history.error and history.observation is None
    assert history.take(Look(observation(info(20)), 1010.0, 0.0), 1010.0) and history.error == ""
    assert {change.kind for change in history.changes} == {"new", "job"}
    assert history.take(Look(None, 1020.0, 0.0), 1020.0) and history.error
    assert [change.kind for change in history.changes] == ["removed", "job"]


def test_the_listing_stays_while_the_disk_fails_or_hangs():
    for found in (Failure(OSError(errno.EIO, "bad", "/ckpt")), "hangs"):
        history = seen(observation(info(20)), found)
        assert history.error and history.seen_at == 1000.0 and history.listing.checkpoints[0].step == 20
        assert history.changes == ()


def test_a_failure_is_told_once_and_its_end_as_well():
    history = seen(observation(info(20)))
    assert [history.take(look, 1010.0) for look in (None, None, Look(observation(info(20)), 1020.0, 0.0),
                                                    Look(observation(info(20)), 1030.0, 0.0))] == [True, False, True, False]


def test_a_disk_that_is_always_slow_is_no_failure():
    """Each look takes 4 s, so the view goes on without it after PATIENCE: a log got two listings for each look."""
    history = seen(observation(info(20)))
    history.seconds = 4.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "PATIENCE", 3.0)
        found = [history.take(look, 1000.0 + 20 * number) for number in range(5)
                 for look in (None, Look(observation(info(20)), 1000.0 + 20 * number, 4.0))]
        assert not any(found)
        assert [history.take(None, at) for at in (1100.0, 1112.0, 1113.0, 1200.0)] == [False, False, True, False]


def test_the_newest_of_several_looks_is_returned(looks):
    bounded = looks(lambda: None)
    bounded._ended += [Look(None, 1.0, 0.0), Look(None, 2.0, 0.0)]
    assert [bounded(), bounded()] == [Look(None, 2.0, 0.0), Look(None, 5.0, 0.0)]


def test_many_checkpoints_cost_no_more_for_each():
    class Counted(str):
        __hash__ = str.__hash__
        compared = 0

        def __eq__(self, other):
            Counted.compared += 1
            return str.__eq__(self, other)
    rows = [info(step, origin=Counted("mindresume")) for step in range(500, 0, -1)]
    history = seen(observation(*rows), observation(*rows[:-1]))
    Counted.compared = 0
    frame(history, "/ckpt", 5.0, 1000.0, 24)
    assert Counted.compared < 20 * len(rows)


def test_a_look_that_hangs_is_not_waited_for_and_not_repeated(monkeypatch, looks):
    monkeypatch.setattr(watch, "PATIENCE", 0.01)
    answers, begun, started = threading.Event(), threading.Event(), []

    def look():
        started.append(1)
        begun.set()
        answers.wait(600)
        return
    bounded = looks(look)
    try:
        assert bounded() is None and begun.wait(600)
        assert [bounded(), bounded()] == [None, None] and len(started) == 1
    finally:
        answers.set()
    with bounded._running:                      # the thread has ended its look
        pass
    assert bounded() == Look(None, 5.0, 0.0)


def test_a_look_that_raises_is_a_failure(looks):
    def look():
        raise OSError(errno.EIO, "bad", "/ckpt")
    found = looks(look)().found
    assert isinstance(found, Failure) and found.error.errno == errno.EIO


def test_a_file_that_is_no_checkpoint_ends_the_command_at_once(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("x")
    with pytest.raises(ConfigError):
        watch.watch(str(path), Lines(str(path), False))


def test_pauses_are_longer_where_a_look_takes_long(monkeypatch):
    times, pauses = iter([0.0, 7.0, 7.0, 7.0, 100.0, 107.0]), []

    def wait(seconds):
        pauses.append(seconds)
        raise Stopped(2)
    monkeypatch.setattr(watch, "observe", lambda folder, world_size: None)
    with runtime.answers({runtime.time: lambda: next(times), runtime.sleep: wait}), pytest.raises(Stopped):
        watch.watch("/ckpt", Lines("/ckpt", True), every=5.0)
    assert pauses == [28.0]


# ---- lines -----------------------------------------------------------------------------------------------------------

def test_a_log_gets_a_listing_whenever_something_changed(tmp_path, capsys, monkeypatch):
    root = tmp_path / "ckpt"
    printed = []
    monkeypatch.setattr(watch, "print_listing", lambda found: printed.append([row.step for row in found]))
    run(root, Lines(str(root), False), lambda: save(root, 10), lambda: None, lambda: save(root, 20), lambda: None)
    assert printed == [[10], [20, 10]]
    assert [line[:4] for line in capsys.readouterr().out.splitlines()].count("----") == 3       # and that there is no folder yet


def test_json_is_one_object_a_line(tmp_path, capsys):
    root = tmp_path / "ckpt"
    run(root, Lines(str(root), True), lambda: write_rank(root, 10, 0, 4), lambda: save(root, 10),
        lambda: None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(row["error"]) for row in rows] == [True, False, False]
    assert rows[0]["listing"] is None and rows[1]["listing"]["checkpoints"][0]["state"] == "incomplete"
    assert [change["kind"] for row in rows for change in row["changes"]] == ["new", "committed"]


def test_the_command_prints_lines_where_output_is_no_terminal_and_ends_as_ctrl_c_does(tmp_path, call, monkeypatch):
    save(tmp_path, 10)
    monkeypatch.setattr(watch, "watch", watched)
    status, out, err = call(tmp_path, "--watch")
    assert (status, err) == (130, "") and "safetensors" in out
    status, out, err = call(tmp_path, "--watch", "--json")
    assert (status, err) == (130, "") and json.loads(out)["listing"]["root"] == str(tmp_path)


def test_every_needs_watch(tmp_path, call):
    status, _, err = call(tmp_path, "--every", "3")
    assert status == 2 and "--watch" in err


def test_a_reader_that_goes_away_ends_the_command(tmp_path, call, monkeypatch):
    class Pipe(io.TextIOWrapper):
        def flush(self):
            raise BrokenPipeError
    with open(tmp_path / "out", "wb") as file:
        pipe = Pipe(file)
        monkeypatch.setattr("sys.stdout", pipe)
        assert call(tmp_path, "--watch")[0] == 141


def test_what_the_encoding_of_the_output_lacks_does_not_end_the_command(tmp_path, call, monkeypatch):
    folder = tmp_path / "\u68c0"
    save(folder, 10)
    monkeypatch.setattr(watch, "watch", watched)
    with open(tmp_path / "out", "w", encoding="latin-1") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert call(folder, "--watch")[0] == 130
    assert "\\u68c0" in (tmp_path / "out").read_text(encoding="latin-1")


# ---- the screen ------------------------------------------------------------------------------------------------------

def screen_text(history, height=24, now=1005.0):
    console = Console(width=120, height=height, markup=False, emoji=False, highlight=False, force_terminal=True,
                      color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(frame(history, "/ckpt", 5.0, now, height))
    return captured.get()


def test_the_screen_shows_the_job_the_saves_and_the_room():
    rows = info(60, at=990.0), info(40, at=970.0), info(20, at=950.0)
    history = seen(observation(*rows, beat=(1, 61, 50.0)), observation(*rows, beat=(2, 70, 54.5)))
    text = screen_text(history, now=1012.0)
    for words in ("step 70", "2 steps/s", "heartbeat 2, 2 s ago (every 15 s)", "last save: step 60, 22 s ago",
                  "next: step 80, in about 3 s", "10.0 GiB free: room for 10 more of 1.0 GiB"):
        assert words in text


def test_a_job_that_sends_no_heartbeat_is_shown():
    looks = [observation(info(20), beat=(7, 25, 50.0))] * 6
    assert "no new one" not in screen_text(seen(*looks[:5]), now=1049.0)
    assert "heartbeat 7 (every 15 s), no new one for 50 s" in screen_text(seen(*looks), now=1050.0)
    assert "no new one" not in screen_text(seen(*looks, observation(beat=(8, 30, 65.0))), now=1060.0)


def test_no_job_is_late_while_nobody_looks():
    """With --every 60, or while the disk hangs, nothing is known of the heartbeats since the last look."""
    assert "no new one" not in screen_text(seen(observation(info(20), beat=(7, 25, 50.0))), now=1059.0)
    assert "no new one" not in screen_text(seen(observation(info(20), beat=(7, 25, 50.0)), "hangs"), now=1300.0)


def test_the_screen_shows_which_ranks_are_still_writing(tmp_path):
    publish_lease(tmp_path, ELSEWHERE)
    for rank in (0, 3):
        write_rank(tmp_path, 20, rank, 4)
    text = screen_text(seen(observe(tmp_path)))
    assert "saving step 20: 2 of 4 ranks recorded, missing: rank 1, 2" in text
    assert "never completed" not in text


@pytest.mark.parametrize("height", [8, 12, 24, 60])
def test_the_screen_fits_the_terminal(height):
    rows = [info(step, problem=None, warnings=("a warning",) if step % 100 else ()) for step in range(2000, 0, -50)]
    history = seen(observation(*rows, notes=("one", "two"), memory=tuple(info(step) for step in (2050, 2040, 2030, 2020))))
    lines = screen_text(history, height).splitlines()
    assert len(lines) <= max(height, 9)
    assert any(line.startswith("2000 ") for line in lines) and any("older" in line for line in lines)


def test_the_screen_says_what_changed_for_one_look():
    history = seen(observation(info(40), info(20)), observation(info(60), info(40)))
    text = screen_text(history)
    assert [line.split()[0] + " " + line.split()[-1] for line in text.splitlines() if "GiB  safetensors" in line] == [
        "60 new", "40 complete", "20 removed"]
    history.take(Look(observation(info(60), info(40)), 1030.0, 0.0), 1030.0)
    assert "new" not in screen_text(history) and "removed" not in screen_text(history)


def test_the_screen_says_since_when_the_listing_is_old():
    at = time.strftime("%H:%M:%S", time.localtime(1000.0))
    assert f"the listing is from {at}" in screen_text(seen(observation(info(20)), "hangs"), now=1300.0)
    assert "waiting" in screen_text(seen(None)) and "waiting" in screen_text(seen("hangs"))


def test_names_from_the_disk_do_not_control_the_terminal():
    bad = info(20, warnings=("\x1b[2J",))
    user = DirectoryUser(replace(JOB, host="\x1b[2J"), True)
    assert "\x1b[2J" not in screen_text(seen(observation(bad, notes=("\x1b[2J",), users=(user,))))


def test_the_screen_is_shown_each_second_and_the_terminal_is_left_as_it_was(tmp_path):
    save(tmp_path, 10)
    with open(tmp_path / "typescript", "w+") as file:
        console = Console(file=file, width=100, height=20, force_terminal=True, color_system=None, legacy_windows=False)
        with Screen(str(tmp_path), 5.0, console) as screen:
            run(tmp_path, screen, lambda: None, lambda: None)
        file.seek(0)
        text = file.read()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1 and text.count("last save: step 10") == 3


def test_the_terminal_is_left_if_another_ctrl_c_comes_meanwhile(tmp_path):
    class Terminal(io.StringIO):
        fails = False

        def write(self, text):
            if self.fails:
                self.fails = False
                raise Stopped(2)
            return super().write(text)
    terminal = Terminal()
    console = Console(file=terminal, width=100, height=20, force_terminal=True, color_system=None, legacy_windows=False)
    with pytest.raises(Stopped), Screen(str(tmp_path), 5.0, console):
        terminal.fails = True
    assert terminal.getvalue().endswith("\x1b[?25h\x1b[?1049l")


# ---- foreign folders -------------------------------------------------------------------------------------------------

def test_checkpoints_of_mindformers_are_watched_too(tmp_path):
    write_foreign(tmp_path, 10)
    before = mindresume.open(tmp_path).list()
    write_foreign(tmp_path, 20)
    after = mindresume.open(tmp_path).list()
    path_of(tmp_path, 10, 0).unlink()
    assert kinds(before, after) == [("new", 20)]
    assert ("changed", 10) in kinds(after, mindresume.open(tmp_path).list())

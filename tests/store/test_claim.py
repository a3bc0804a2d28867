"""One job a folder; nobody is taken for dead by age; a reader's checkpoint stays."""
import errno
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from folders import STORAGE, save

from mindresume.errors import FolderInUseError, RecordError
from mindresume.manifest import FOLDER, attempt_name, run_name, run_sequence, seal, unseal
from mindresume.store.claim import (
    BEAT,
    GIVEN_UP,
    PATIENCE,
    SAVING,
    Claim,
    Holds,
    Owner,
    about_to_remove,
    claims,
    ended,
    fence,
    hold,
    holds,
    lives,
    next_run,
    occupy,
    owner_of_this_process,
)
from mindresume.store.storage import PosixStorage

ME = owner_of_this_process(SAVING, 4)
ELSEWHERE = replace(ME, host="node7", machine="another/1", pid=1)


class Time:
    """A clock that only ``sleep`` moves; ``also`` is called then."""

    def __init__(self, also=lambda now: None):
        self.now, self.also = 0.0, also

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.also(self.now)


def start(root, owner=ME, time=None, log=None):
    time = time or Time()
    return occupy(STORAGE, str(root), owner, log=log or (lambda text: None), clock=time.clock, sleep=time.sleep)


def left_by(root, owner, sequence=1):
    claim = Claim(STORAGE, str(root), replace(owner, run=run_name(sequence, "0000aaaa")))
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    claim.publish()
    return claim


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    owner = replace(ME, pid=child.pid, started=12345)
    child.wait()
    return owner


def test_an_empty_folder_is_taken_at_once_and_left(tmp_path):
    time = Time()
    claim = start(tmp_path / "checkpoint", time=time)
    assert run_sequence(claim.run) == 1 and time.now == 0
    assert [owner.run for owner in claims(STORAGE, str(tmp_path / "checkpoint"))] == [claim.run]
    claim.leave()
    claim.leave()
    assert os.listdir(tmp_path / "checkpoint" / FOLDER) == []


def test_a_second_job_is_refused_and_both_are_named(tmp_path):
    first = start(tmp_path)
    time = Time()
    with pytest.raises(FolderInUseError) as error:
        start(tmp_path, replace(ME, host="node2", machine="m2/1", pid=77), time)
    assert first.run in str(error.value) and str(os.getpid()) in str(error.value)
    assert "host node2, process 77" in str(error.value) and "output_dir" in str(error.value)
    assert [owner.run for owner in claims(STORAGE, str(tmp_path))] == [first.run]
    assert time.now >= BEAT * PATIENCE


def test_a_process_that_is_just_ending_is_waited_for(tmp_path):
    first = start(tmp_path)
    time = Time(lambda now: first.leave() if now > 10 else None)
    second = start(tmp_path, time=time)
    assert 10 < time.now < 12
    assert run_sequence(second.run) == 1 or run_sequence(second.run) == 2


def test_a_dead_process_of_this_machine_is_known_at_once(tmp_path):
    log, time = [], Time()
    dead = left_by(tmp_path, dead_process())
    (tmp_path / FOLDER / f".{attempt_name(5, dead.run)}.{dead.run}.mindresume-tmp").write_text("half")
    claim = start(tmp_path, time=time, log=log.append)
    assert time.now == 0 and run_sequence(claim.run) == 2
    assert "ended without a word" in log[0]
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{claim.run}.json"]


class Killed(PosixStorage):
    """Dies while it publishes its claim: before the rename."""

    def rename(self, old, new):
        raise KeyboardInterrupt


def test_a_job_that_is_killed_while_it_claims_the_folder_leaves_nothing_to_the_next_but_one(tmp_path):
    start(tmp_path).leave()
    with pytest.raises(KeyboardInterrupt):
        occupy(Killed(), str(tmp_path), ME)
    left, = os.listdir(tmp_path / FOLDER)
    assert left.startswith(".claim-0001-") and next_run([left]).startswith("0002-")
    claim, time = start(tmp_path, time=(time := Time())), time
    assert run_sequence(claim.run) == 2 and time.now == 0
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{claim.run}.json"]


@pytest.mark.parametrize("name", [f".tracker-0000000004.{run_name(7, '0000aaaa')}.mindresume-tmp",
                                  f".emergency.12.{run_name(7, '0000aaaa')}.mindresume-tmp"])
def test_whatever_a_run_began_to_write_tells_its_number(name):
    assert run_sequence(next_run([name])) == 8


@pytest.mark.parametrize("name", [".probe-0123abcd-0.0123abcd.mindresume-tmp", ".x.mindresume-tmp", ".x.0007-0000aaaa.swp",
                                  ".x.0007-0000AAAA.mindresume-tmp", f".claim.{run_name(0, '0000aaaa')}.mindresume-tmp"])
def test_other_half_written_files_tell_no_number(name):
    assert run_sequence(next_run([name])) == 1


def test_half_written_claims_of_readers_go_when_they_are_old(tmp_path):
    """The run of a reader has the number 0, which is before that of every job: only its age can tell that it is over."""
    (tmp_path / FOLDER).mkdir()
    names = [f".claim-{run}.json.{run}.mindresume-tmp" for run in (run_name(0, "0000aaaa"), run_name(0, "0000bbbb"))]
    for name, age in zip(names, (3700, 3500), strict=True):
        (tmp_path / FOLDER / name).write_text("half")
        now = (tmp_path / FOLDER / name).stat().st_mtime
        os.utime(tmp_path / FOLDER / name, (now - age, now - age))
    claim = start(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [names[1], f"claim-{claim.run}.json"]


def test_what_cannot_be_removed_of_those_before_stops_no_job(tmp_path):
    dead = left_by(tmp_path, dead_process(), 3)
    ended_one = f"ended-{run_name(2, '0000bbbb')}.json"
    for name in (ended_one, f".x.{dead.run}.mindresume-tmp"):
        (tmp_path / FOLDER / name).write_bytes(b"")

    class Kept(PosixStorage):
        def remove(self, path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
    before = set(os.listdir(tmp_path / FOLDER))
    claim = occupy(Kept(), str(tmp_path), ME)
    assert run_sequence(claim.run) == 4 and set(os.listdir(tmp_path / FOLDER)) == {*before, f"claim-{claim.run}.json"}
    claim.storage = STORAGE
    claim.leave()
    later = start(tmp_path)
    assert run_sequence(later.run) == 4 and os.listdir(tmp_path / FOLDER) == [f"claim-{later.run}.json"]


def test_a_zombie_is_dead(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    owner = replace(ME, pid=child.pid, started=started)
    assert lives(owner) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert lives(owner) is False
    child.communicate()


def test_a_number_used_again_is_another_process():
    assert lives(ME) is True
    assert lives(replace(ME, started=ME.started + 1)) is False
    assert lives(ELSEWHERE) is None
    assert lives(replace(ME, machine="")) is None


def test_a_silent_owner_elsewhere_is_watched_then_taken_for_dead(tmp_path):
    left_by(tmp_path, ELSEWHERE)
    log, time = [], Time()
    claim = start(tmp_path, time=time, log=log.append)
    assert BEAT * PATIENCE <= time.now < BEAT * (PATIENCE + 1)
    assert run_sequence(claim.run) == 2 and "node7" in log[0] and "watching for 45 s" in log[0]


def test_an_owner_elsewhere_that_beats_is_alive(tmp_path):
    other = left_by(tmp_path, ELSEWHERE)
    beaten = []

    def beat(now):
        if now > 20 and not beaten:
            beaten.append(other.beat())
    time = Time(beat)
    with pytest.raises(FolderInUseError, match="node7"):
        start(tmp_path, time=time)
    assert time.now < 30


class During(PosixStorage):
    """Right before its operation number ``at`` something else happens."""

    def __init__(self, at, act):
        self.left, self.act = at, act

    def _count(self):
        self.left -= 1
        if self.left == 0:
            self.act()

    def list(self, folder):
        self._count()
        return super().list(folder)

    def open(self, path):
        self._count()
        return super().open(path)

    def write(self, path, pieces, size=0):
        self._count()
        return super().write(path, pieces, size)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, path):
        self._count()
        super().remove(path)


@pytest.mark.parametrize("other", [ME, ELSEWHERE])
@pytest.mark.parametrize("token", ["00000000", "ffffffff"])
@pytest.mark.parametrize("at", range(1, 14))
def test_of_two_that_start_at_once_one_acquires_the_folder_and_is_never_thrown_out(tmp_path, token, other, at):
    """The later of the two threw out one that had acquired the folder already."""
    acquired = []

    def begin(owner, storage):
        time = Time(lambda now: [claim.beat() for claim in acquired])
        with suppress(FolderInUseError):
            acquired.append(occupy(storage, str(tmp_path), owner, clock=time.clock, sleep=time.sleep))
        for claim in acquired:
            fence(STORAGE, str(tmp_path), claim.run)
    mine = replace(ME, run=run_name(1, "88888888"))
    begin(mine, During(at, lambda: begin(replace(other, run=run_name(1, token)), STORAGE)))
    claim, = acquired
    fence(STORAGE, str(tmp_path), claim.run)


def rival_of(root, token, owner=ELSEWHERE):
    return Claim(STORAGE, str(root), replace(owner, run=run_name(1, token)))


def test_of_two_that_start_at_once_the_earlier_waits_for_the_later_to_give_way(tmp_path):
    rival = rival_of(tmp_path, "ffffffff")
    time = Time(lambda now: rival.withdraw())
    owner = replace(ME, run=run_name(1, "88888888"))
    storage = During(4, lambda: rival.publish())                # watched, listed, written: now it gets its name
    claim = occupy(storage, str(tmp_path), owner, clock=time.clock, sleep=time.sleep)
    assert 0 < time.now < 3 and os.listdir(tmp_path / FOLDER) == [f"claim-{claim.run}.json"]


def test_of_two_that_start_at_once_the_earlier_gives_way_if_the_later_has_acquired_the_folder(tmp_path):
    rival = rival_of(tmp_path, "ffffffff")
    time, owner = Time(lambda now: rival.beat()), replace(ME, run=run_name(1, "88888888"))
    with pytest.raises(FolderInUseError, match="run 0001-ffffffff on host node7"):
        occupy(During(4, lambda: rival.publish()), str(tmp_path), owner, clock=time.clock, sleep=time.sleep)
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"] and time.now < 3


@pytest.mark.parametrize("traced", [True, False])
def test_who_gives_way_leaves_no_trace(tmp_path, traced):
    """A number that seemed to be of a later run, which has ended, threw out the one that stayed."""
    rival = rival_of(tmp_path, "00000000")
    owner = replace(ME, run=run_name(1, "88888888"))
    with pytest.raises(FolderInUseError, match="run 0001-00000000"):
        occupy(During(4, lambda: rival.publish()), str(tmp_path), owner, traced=traced)
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"]


@pytest.mark.parametrize("token", ["00000000", "ffffffff"])
def test_a_number_that_another_job_has_taken_meanwhile_is_not_used_again(tmp_path, token):
    """It began, saved and ended between the listing from which the number came and the claim: two runs had one number."""
    storage = During(3, lambda: save(tmp_path, 5, 1, run=run_name(1, token)))
    assert run_sequence(occupy(storage, str(tmp_path), ME).run) == 2


class Remembering(PosixStorage):
    """As a host does on NFS: believes a listing until it changes the folder itself. ``act`` comes before its first claim."""

    def __init__(self, act):
        self.listed, self.act = {}, act

    def list(self, folder):
        if folder not in self.listed:
            self.listed[folder] = super().list(folder)
        return self.listed[folder]

    def rename(self, old, new):
        act, self.act = self.act, lambda: None
        act()
        super().rename(old, new)
        self.listed.pop(os.path.dirname(new), None)

    def remove(self, path):
        super().remove(path)
        self.listed.pop(os.path.dirname(path), None)


def test_who_has_waited_for_a_later_name_does_not_believe_what_it_listed_before(tmp_path):
    """The other had acquired the folder, saved and ended meanwhile: both had one number, and the second was thrown out."""
    rival = rival_of(tmp_path, "ffffffff")

    def ends(now):
        if now > 5 and claims(STORAGE, str(tmp_path))[-1].run == rival.run:
            save(tmp_path, 5, 1, run=rival.run)
            rival.leave()

    def begins():
        rival.publish()
        rival.beat()
    time = Time(ends)
    run = occupy(Remembering(begins), str(tmp_path), ME, clock=time.clock, sleep=time.sleep).run
    assert run_sequence(run) == 2 and 5 < time.now < 8
    fence(STORAGE, str(tmp_path), run)


def test_a_number_that_all_nodes_have_agreed_on_and_that_is_in_use_is_refused(tmp_path):
    save(tmp_path, 5, 1, run=run_name(1, "00000000"))
    with pytest.raises(FolderInUseError, match="run 0001-00000000"):
        start(tmp_path, replace(ME, run=run_name(1, "88888888")))
    assert os.listdir(tmp_path / FOLDER) == [attempt_name(5, run_name(1, "00000000"))]


def test_a_claim_that_is_only_published_does_not_stop_a_job_that_has_acquired_the_folder(tmp_path):
    claim = start(tmp_path)
    rival = left_by(tmp_path, ELSEWHERE, 2)
    fence(STORAGE, str(tmp_path), claim.run)
    rival.beat()
    with pytest.raises(FolderInUseError, match="node7"):
        fence(STORAGE, str(tmp_path), claim.run)


@pytest.mark.parametrize("token, stops", [("00000000", False), ("ffffffff", True)])
def test_of_two_runs_with_one_number_the_later_name_counts(tmp_path, token, stops):
    save(tmp_path, 5, 1, run=run_name(1, token))
    if stops:
        with pytest.raises(FolderInUseError):
            fence(STORAGE, str(tmp_path), run_name(1, "88888888"))
    else:
        fence(STORAGE, str(tmp_path), run_name(1, "88888888"))


def test_of_two_that_start_at_once_one_removes_the_claim_that_the_other_is_writing(tmp_path):
    """It takes it for that of a dead job; whoever writes it is told who is there, not that a file has vanished."""
    first = []

    class Slow(PosixStorage):
        def rename(self, old, new):
            first.append(start(tmp_path))
            super().rename(old, new)
    with pytest.raises(FolderInUseError, match="is in use: run 0002"):
        occupy(Slow(), str(tmp_path), ME)
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{first[0].run}.json"]
    fence(STORAGE, str(tmp_path), first[0].run)


def test_a_claim_that_cannot_be_published_is_an_error_and_does_not_stay(tmp_path):
    class Unsettled(PosixStorage):
        def sync(self, folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), folder)
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(OSError, match="Input/output error"):
        occupy(Unsettled(), str(tmp_path), ME)
    assert os.listdir(tmp_path / FOLDER) == []

    class Full(PosixStorage):
        def write(self, path, pieces, size=0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    with pytest.raises(OSError, match="No space left"):
        occupy(Full(), str(tmp_path), ME)
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_job_taken_for_dead_stops_saving_when_it_wakes_up(tmp_path):
    first = left_by(tmp_path, ELSEWHERE)
    fence(STORAGE, str(tmp_path), first.run)
    second = start(tmp_path)
    fence(STORAGE, str(tmp_path), second.run)
    with pytest.raises(FolderInUseError) as error:
        fence(STORAGE, str(tmp_path), first.run)
    assert second.run in str(error.value) and first.run in str(error.value)


def test_also_after_its_successor_has_ended(tmp_path):
    save(tmp_path, 5, 1, run=run_name(2, "0000bbbb"))
    with pytest.raises(FolderInUseError, match="run 0002-0000bbbb has taken over"):
        fence(STORAGE, str(tmp_path), run_name(1, "0000aaaa"))


def test_a_claim_removed_by_hand_does_not_stop_a_job(tmp_path):
    claim = start(tmp_path)
    for path in (tmp_path / FOLDER).iterdir():
        path.unlink()
    fence(STORAGE, str(tmp_path), claim.run)
    claim.beat()
    assert len(claims(STORAGE, str(tmp_path))) == 1


class Stale(PosixStorage):
    """A claim that is just being replaced by its owner on another host: so many times the old file is what this one has."""

    def __init__(self, times):
        self.left = times

    def open(self, path):
        if "claim-" in path and self.left:
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super().open(path)


def test_a_claim_that_cannot_be_read_for_a_moment_is_a_claim(tmp_path):
    """The living job was thrown out: the second one did not even see it."""
    left_by(tmp_path, ME)
    with pytest.raises(FolderInUseError, match="is in use: run 0001"):
        occupy(Stale(1), str(tmp_path), ME, clock=(time := Time()).clock, sleep=time.sleep)
    left_by(tmp_path, ELSEWHERE)
    time = Time()
    claim = occupy(Stale(5), str(tmp_path), ME, clock=time.clock, sleep=time.sleep)         # silent since it could be read
    assert run_sequence(claim.run) == 2 and BEAT * PATIENCE + 4 <= time.now < BEAT * PATIENCE + 6


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"\0" * len(data), None])
def test_a_claim_that_stays_unreadable_is_taken_for_alive(tmp_path, damage):
    """Damaged, or of a later version: nobody is thrown out, and the file is named."""
    claim = left_by(tmp_path, dead_process())
    path = tmp_path / FOLDER / f"claim-{claim.run}.json"
    path.write_bytes(damage(path.read_bytes()) if damage else seal({"version": 2, "kind": "claim"}))
    time = Time()
    with pytest.raises(FolderInUseError) as error:
        start(tmp_path, time=time)
    assert f"remove {path} and start again" in str(error.value) and time.now == BEAT * PATIENCE
    assert os.listdir(tmp_path / FOLDER) == [path.name]
    assert not ended(STORAGE, str(tmp_path))(claim.run)             # what it is saving is no debris
    path.unlink()
    assert run_sequence(start(tmp_path).run) == 1


def test_of_two_that_start_at_once_an_unreadable_claim_counts_too(tmp_path):
    rival = Claim(STORAGE, str(tmp_path), replace(ME, run=run_name(1, "ffffffff")))

    class Late(Stale):
        def rename(self, old, new):
            rival.publish()
            self.left = 99
            super().rename(old, new)
    time = Time()
    with pytest.raises(FolderInUseError, match="by which run 0001-ffffffff says that it saves there, cannot be read"):
        occupy(Late(0), str(tmp_path), ME, clock=time.clock, sleep=time.sleep)
    assert os.listdir(tmp_path / FOLDER) == [f"claim-{rival.run}.json"]


# ---- how long an owner elsewhere is watched ------------------------------------------------------------------------------

@pytest.mark.parametrize("mine", [0.0, 0.1, BEAT, 200.0])
@pytest.mark.parametrize("theirs", [2.0, BEAT, 100.0])
def test_its_own_beats_count_not_those_of_the_next_job(tmp_path, mine, theirs):
    left_by(tmp_path, replace(ELSEWHERE, every=theirs))
    time = Time()
    claim = occupy(STORAGE, str(tmp_path), ME, mine, clock=time.clock, sleep=time.sleep)
    assert theirs * PATIENCE <= time.now < theirs * PATIENCE + 1.5
    assert claims(STORAGE, str(tmp_path))[0].every == mine and claim.run == claims(STORAGE, str(tmp_path))[0].run


@pytest.mark.parametrize("every, said", [(0.0, "there are none"), (3600.0, "only every 3600 s")])
def test_an_owner_elsewhere_that_gives_no_signs_of_life_is_not_taken_for_dead(tmp_path, every, said):
    claim, time = left_by(tmp_path, replace(ELSEWHERE, every=every)), Time()
    with pytest.raises(FolderInUseError) as error:
        start(tmp_path, time=time)
    path = tmp_path / FOLDER / f"claim-{claim.run}.json"
    assert said in str(error.value) and f"remove {path} and start again" in str(error.value) and "node7" in str(error.value)
    assert time.now == BEAT * PATIENCE


def test_without_beats_a_dead_process_of_this_machine_is_known_all_the_same(tmp_path):
    left_by(tmp_path, replace(dead_process(), every=0.0))
    time = Time()
    assert run_sequence(start(tmp_path, time=time).run) == 2 and time.now == 0


def test_a_claim_of_before_does_not_say_how_often_it_beats(tmp_path):
    claim = left_by(tmp_path, replace(ELSEWHERE, every=100.0))
    path = tmp_path / FOLDER / f"claim-{claim.run}.json"
    with open(path, "rb") as file:
        head, _ = unseal(file, "claim")
    del head["every"]
    path.write_bytes(seal(head))
    time = Time()
    assert run_sequence(start(tmp_path, time=time).run) == 2 and BEAT * PATIENCE <= time.now < BEAT * PATIENCE + 1.5


@pytest.mark.parametrize("every", [-1, "15", None, True, float("nan")])
def test_an_impossible_interval(tmp_path, every):
    path = tmp_path / "claim"
    head = json.loads(replace(ELSEWHERE, run=run_name(1, "0000aaaa")).encode().split(b"\n")[1])
    path.write_bytes(seal({**head, "every": every}))
    with pytest.raises(RecordError):
        Owner.read(STORAGE, str(path))


def test_a_reader_holds_its_checkpoint_and_lets_it_go(tmp_path):
    save(tmp_path, 5, 1)
    name = next(name for name in os.listdir(tmp_path / FOLDER))
    claim = hold(STORAGE, str(tmp_path), name, str(tmp_path / FOLDER / name))
    assert set(holds(STORAGE, str(tmp_path))) == {name}
    assert str(os.getpid()) in holds(STORAGE, str(tmp_path))[name]
    claim.leave()
    assert holds(STORAGE, str(tmp_path)) == {}
    gone = attempt_name(99, run_name(1, "0000aaaa"))
    assert hold(STORAGE, str(tmp_path), gone, str(tmp_path / FOLDER / gone)) is None
    assert holds(STORAGE, str(tmp_path)) == {}


@pytest.mark.parametrize("goes", [True, False])
def test_a_reader_waits_while_somebody_is_about_to_remove_it(tmp_path, goes):
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    box, others = tmp_path / FOLDER / name, about_to_remove(STORAGE, str(tmp_path), [name])
    assert holds(STORAGE, str(tmp_path)) == {}

    def act(now):
        if now > 2:
            if goes:
                box.rename(tmp_path / "gone")
            others.leave()
    time = Time(act)
    claim = hold(STORAGE, str(tmp_path), name, str(box), sleep=time.sleep)
    assert (claim is None) == goes and 2 < time.now < 4
    if claim:
        claim.leave()
    assert [name for name in os.listdir(tmp_path / FOLDER) if name.startswith("claim")] == []


@pytest.mark.parametrize("owner, waits", [(ELSEWHERE, True), (None, False)])
def test_a_reader_does_not_wait_for_ever(tmp_path, owner, waits):
    """Who removes it may have died: on this machine that is known at once."""
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    left_by(tmp_path, replace(owner or dead_process(), purpose="removing", holds=(name,), every=0.0), 0)
    time = Time()
    claim = hold(STORAGE, str(tmp_path), name, str(tmp_path / FOLDER / name), sleep=time.sleep)
    assert claim is not None and (5 < time.now < 20 if waits else time.now == 0)
    claim.leave()


def test_a_reader_does_not_stop_a_job_from_saving(tmp_path):
    save(tmp_path, 5, 1)
    name = os.listdir(tmp_path / FOLDER)[0]
    claim = hold(STORAGE, str(tmp_path), name, str(tmp_path / FOLDER / name))
    time = Time()
    job = start(tmp_path, time=time)
    fence(STORAGE, str(tmp_path), job.run)
    assert time.now == 0
    claim.leave()


def test_a_dead_reader_holds_nothing(tmp_path):
    dead = replace(dead_process(), purpose="loading", holds=("step-x",))
    left_by(tmp_path, dead, sequence=0)
    assert holds(STORAGE, str(tmp_path)) == {} and claims(STORAGE, str(tmp_path)) == []


def test_a_reader_elsewhere_holds_until_it_was_silent_for_long(tmp_path):
    reader = left_by(tmp_path, replace(ELSEWHERE, purpose="loading", holds=("step-x",)), sequence=0)
    now = [0.0]
    seen = Holds(STORAGE, str(tmp_path), clock=lambda: now[0])
    assert set(seen()) == {"step-x"}
    now[0] = BEAT * GIVEN_UP
    reader.beat()
    assert set(seen()) == {"step-x"}
    now[0] += BEAT * GIVEN_UP
    assert set(seen()) == {"step-x"}
    now[0] += 1
    assert seen() == {}


def test_a_readers_claim_that_cannot_be_read_may_hold_any_of_them(tmp_path):
    save(tmp_path, 5, 1)
    save(tmp_path, 10, 1)
    names = {name for name in os.listdir(tmp_path / FOLDER)}
    reader = left_by(tmp_path, replace(ELSEWHERE, purpose="loading", holds=(min(names),)), sequence=0)
    path, now = tmp_path / FOLDER / f"claim-{reader.run}.json", [0.0]
    seen, content = Holds(STORAGE, str(tmp_path), clock=lambda: now[0]), path.read_bytes()
    path.write_bytes(b"x")
    assert set(seen()) == names and "cannot be read" in seen()[min(names)]
    start(tmp_path, time=(time := Time()))                          # it saves nothing, so it stops nobody from it
    assert time.now == 0
    now[0] = BEAT * GIVEN_UP
    assert set(seen()) == names
    now[0] += 1
    assert seen() == {} and path.exists()
    path.write_bytes(content)
    assert set(seen()) == {min(names)}


def test_a_reader_that_beats_rarely_is_given_time(tmp_path):
    left_by(tmp_path, replace(ELSEWHERE, purpose="loading", holds=("step-x",), every=2 * BEAT), sequence=0)
    now = [0.0]
    seen = Holds(STORAGE, str(tmp_path), clock=lambda: now[0])
    assert set(seen()) == {"step-x"}
    now[0] = BEAT * GIVEN_UP + 1
    assert set(seen()) == {"step-x"}
    now[0] = 2 * BEAT * GIVEN_UP + 1
    assert seen() == {}


def test_which_runs_have_ended(tmp_path):
    living, dead, far = left_by(tmp_path, ME, 1), left_by(tmp_path, dead_process(), 2), left_by(tmp_path, ELSEWHERE, 3)
    over = ended(STORAGE, str(tmp_path))
    assert [over(claim.run) for claim in (living, dead, far)] == [False, True, False]
    assert over(run_name(9, "00000009"))


def test_a_claim_beats_by_itself(tmp_path):
    claim = occupy(STORAGE, str(tmp_path), ME, 0.01).start()
    for _ in range(500):
        if claims(STORAGE, str(tmp_path))[0].beat >= 2:
            break
        time.sleep(0.01)
    else:
        pytest.fail("no beat in 5 s")
    claim.leave()
    assert claims(STORAGE, str(tmp_path)) == []

"""What happens in a schedule: which jobs run, on which disks, and what was there before.

    play = Play(SCENARIOS["save"], "safetensors", schedule)
    play.run()
    play.findings()
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mindresume.coordination.lease import ended
from mindresume.coordination.read_locks import ReadLocks, acquire_read_lock, read_locks
from mindresume.errors import MindResumeError, MissingCheckpointError
from mindresume.events.log_lines import line_of
from mindresume.formats.iteration_naming import iteration_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, record_name
from mindresume.saving.async_saver import AsyncSaver, save_job_for
from mindresume.saving.garbage_collector import carry_out, plan
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import SaveTarget
from mindresume.saving.sync_saver import Outcome, Save, SyncSaver
from mindresume.simulation.bucket import BUCKET, Bucket
from mindresume.simulation.cluster import SHARED, Cluster, Host, Process, Struck, lose_power
from mindresume.simulation.disk import Disk
from mindresume.simulation.group import ExchangeError
from mindresume.simulation.jobs import ITERATION, History, Job, Training, shard_of
from mindresume.simulation.mount import Mount
from mindresume.simulation.oracle import STUCK, Finding, judge, pointed
from mindresume.simulation.schedule import KINDS, Schedule
from mindresume.simulation.scheduler import TICK, Killed, Stuck, TooLong
from mindresume.simulation.standins import here, running, standing_in

FORMATS = ("safetensors", "ckpt", ITERATION)
WAYS = ("", "thread", "process")            # of saving: in the training, or behind it
RUN = "0002-1111aaaa"
LIVES = 3                       # times that a platform starts a job
LONGEST_EXCHANGE = 10.0         # seconds; the ranks of a job here wait up to 20 for records
LATER = (0.0, 0.0, 2.5)         # seconds after a first job that a second one is started
A_COMMIT = 200                  # operations, with the removal behind it
SHORT_WORK = 2 * A_COMMIT        # of others: rank 0 commits several steps at once if their records are listed late


@dataclass(frozen=True)
class Scenario:
    """``attack(play)`` starts processes. ``past``: a training that has ended well before; None: an empty disk. ``training``: what
    the attack runs, and what is started again afterwards. ``formats``: that it makes sense for. ``kinds``: of what may strike.
    ``judges``: what must hold of the disks; ``checks(play)``: of the run besides."""
    name: str
    about: str
    attack: Callable[[Play], None]
    training: Training = Training()
    past: Training | None = Training(steps=2)
    formats: tuple[str, ...] = FORMATS
    ways: tuple[str, ...] = WAYS
    kinds: tuple[str, ...] = KINDS
    judges: Callable[..., list[Finding]] = judge
    checks: Callable[[Play], list[Finding]] = lambda play: []


class Play:
    """One run of a scenario in one format and one way of saving."""

    def __init__(self, scenario: Scenario, fmt: str, schedule: Schedule, way: str = "", most: int = 20_000):
        self.scenario, self.format, self.way, self.schedule = scenario, fmt, way, schedule
        self.training = _in_time(replace(scenario.training, format=fmt, async_save=way or False), schedule.tick)
        disks, past = _past(scenario.past and replace(scenario.past, format=fmt), self.training.apart, self.training.hosts,
                            bool(self.training.url))
        self.history = past.copy()
        self.history.sick = scenario.training.sick
        self.cluster = Cluster(schedule, {name: disk.copy() for name, disk in disks.items()}, most)
        if self.training.url:
            self.lose_pods()
        self.jobs: list[Job] = []
        self.stuck = ""
        self.variant = ""                           # of disks that are equal but for what a signature does not tell: times

    def run(self, collect: Callable[[Play, int], None] | None = None) -> Play:
        """``collect(play, number)``: called before each operation before which the disks have changed, or what was told of them,
        and at the end, as if there were one operation more. A loss of power that the schedule has later strikes at the end."""
        cluster = self.cluster
        seen = [self._news()]

        def observe(process: Process, name: str, path: str) -> None:
            news = self._news()
            if news != seen[0]:
                seen[0] = news
                collect(self, cluster.at)
        cluster.observe = observe if collect is not None else None
        with standing_in(cluster):
            self.scenario.attack(self)
            try:
                cluster.scheduler.run()
            except (Stuck, TooLong) as error:
                self.stuck = f"{type(error).__name__}: {error}"
            cluster.observe = None
        for give_back in cluster.at_end:
            give_back()
        if collect is not None:
            collect(self, cluster.scheduler.operations + 1)
        for strike in self.schedule.strikes:
            if strike.kind == "power" and strike.at > cluster.scheduler.operations:
                lose_power(cluster.disks, strike.amount)
                cluster.struck.append(Struck(strike, strike.at, "", "the end", ""))
        return self

    def _news(self) -> tuple[int, int, int]:
        """Counts what has changed of the disks, and of what people were told."""
        history = self.history
        return (sum(disk.changed for disk in self.cluster.disks.values()), sum(map(len, history.reported.values())),
                len(history.failed))

    def findings(self, again: bool = True) -> list[Finding]:
        """Of the end of it. ``again``: the disks are judged, which changes them."""
        found = [Finding(STUCK, self.stuck)] if self.stuck else []
        found += [Finding(STUCK, f"{job.name}: {job.communicator.mismatch}") for job in self.jobs if job.communicator.mismatch]
        found += [Finding(STUCK, f"{process.name}: {type(process.error).__name__}: {process.error}")
                  for process in self.cluster.processes if not _may_end_with(process.error)]
        limit = LONGEST_EXCHANGE + SHORT_WORK * self.schedule.tick
        if not any(struck.strike.kind in ("slow", "pause") for struck in self.cluster.struck):
            found += [Finding(STUCK, f"{job.name}: a rank sat in an exchange for {job.communicator.longest:.0f} s, while others "
                                     f"worked on files") for job in self.jobs if job.communicator.longest > limit]
        if not (found or self.cluster.struck or self.training.apart or self.training.url or self.training.pruned):
            found += pointed(self.cluster.disks, self.history, self.training)
        found += self.scenario.checks(self)
        return found + (self.scenario.judges(self.cluster.disks, self.history, self.training) if again else [])

    def lose_pods(self) -> None:
        """What is on the disks of all nodes is gone; a bucket stays."""
        self.history.reported.clear()
        for name in self.cluster.disks:
            if name != BUCKET:
                self.cluster.disks[name] = Disk(local=True)

    def job(self, training: Training, first: int = 0, hosts: list[Host] | None = None) -> Job:
        """``first``: of the nodes that it runs on, where they share no disk. ``hosts``: default new ones."""
        hosts = hosts or [self.cluster.host("", first + node) for node in range(training.hosts)]
        made = Job(self.cluster, self.history, training, hosts, f"job{len(self.jobs)}")
        self.jobs.append(made)
        return made


def _in_time(training: Training, tick: float) -> Training:
    """Where operations take long, so may an upload, which is many of them: what is to be found are orders of operations, not that
    20 seconds are too short for 80 of them."""
    if not training.url or tick <= TICK:
        return training
    settings = replace(training.settings, commit_timeout=training.settings.commit_timeout + A_COMMIT * tick)
    return replace(training, settings=settings)


def _may_end_with(error: BaseException | None) -> bool:
    """Killed, or with an error that says what is wrong."""
    return error is None or isinstance(error, (Killed, MindResumeError, OSError, ExchangeError))


@lru_cache(maxsize=64)
def _past(training: Training | None, apart: bool, hosts: int, remote: bool) -> tuple[Mapping[str, Disk], History]:
    """Disks on which ``training`` has run to its end; and what it was told."""
    disks = {f"node{node}": Disk(local=True) for node in range(hosts)} if apart or remote else {SHARED: Disk()}
    if remote:
        disks[BUCKET] = Bucket()
    history = History()
    if training is None:
        return disks, history
    cluster = Cluster(Schedule(), disks)
    cluster._tokens = 250_000                                   # names that are never used again
    with standing_in(cluster):
        job = Job(cluster, history, training, [cluster.host("", node) for node in range(training.hosts)], "past")
        job.start()
        cluster.scheduler.run()
    bad = [process for process in cluster.processes if process.error is not None or process.exit]
    if bad:
        raise AssertionError(f"the past does not work: {bad[0].name}: {bad[0].error!r}\n" +
                             "\n".join(line_of(event)[1] for _, event in bad[0].events))
    for disk in disks.values():
        disk.lose_power(lambda: True)
    return disks, history


# ---- saving alone: what two ranks do for a checkpoint, without the start and the end of a job ----------------------------------

def _core(play: Play, steps: tuple[int, ...], keep: int = 0) -> None:
    host = play.cluster.host()
    play.history.sizes[RUN] = play.training.ranks
    for rank in range(play.training.ranks):
        play.cluster.process(host, f"rank{rank}", lambda rank=rank: _save(play, rank, steps, keep))


def _save(play: Play, rank: int, steps: tuple[int, ...], keep: int) -> None:
    training, history, process = play.training, play.history, running()
    lineage = next(iter(history.chosen), RUN)
    place = SaveTarget(Mount(play.cluster, process), training.root, RUN, rank, training.ranks, play.format == ITERATION, (),
                       lineage)
    mine = (KeepLast(keep) if keep else KEEP_ALL) if rank == 0 else None
    saver = AsyncSaver(place, mine, play.way, emit=process.emit, timeout=20.0) if play.way else SyncSaver(
        save_job_for(place, mine, process.emit))

    def hear(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.saved:
                history.reported.setdefault((RUN, outcome.step), set()).add(rank)
            else:
                history.failed[(RUN, outcome.step), rank] = str(outcome.error)
    for step in steps:
        history.began.add((RUN, step))
        saver.save(Save(shard_of(place, step, play.format, 1)))
        hear(saver.poll())
    hear(saver.wait(20.0))
    hear(saver.finish(20.0, 5.0))
    here().scheduler.sleep(200.0)                               # the program goes on, and with it a thread that is late


# ---- whole jobs ----------------------------------------------------------------------------------------------------------------

def _one(play: Play) -> None:
    play.job(play.training).start()


def _exchanged(play: Play) -> None:
    """The same on hosts that remember what they have seen, and later change places."""
    _restarted(play, [play.cluster.host("", node) for node in range(play.training.hosts)])


def _restarted(play: Play, hosts: list[Host] | None = None) -> None:
    """A platform starts the same command again whenever it ends with an error."""
    restarted(play, lambda life: play.job(play.training, hosts=hosts and (hosts[::-1] if life == 2 else hosts)))


def restarted(play: Play, job_of: Callable[[int], Job]) -> None:
    """A platform starts ``job_of(life)``, from life 0 on, until one of them ends without an error; at most ``LIVES``."""
    def work() -> None:
        for life in range(LIVES):
            job = job_of(life)
            job.start()
            while not job.launcher.dead or not job.over:
                here().scheduler.sleep(1.0)
                if job.launcher.dead and not job.ranks:         # killed before it had started any
                    break
            if job.ranks and not any(process.exit for process in job.ranks):
                return
    play.cluster.process(play.cluster.host("platform"), "platform", work)


def _twice(play: Play) -> None:
    """Two jobs are started in one folder, at the same moment or while the first one trains."""
    play.job(play.training).start()

    def work() -> None:
        here().scheduler.sleep(LATER[play.schedule.seed % len(LATER)])
        play.job(play.training).start()
    play.cluster.process(play.cluster.host("platform"), "platform", work)


def _rare_beats(play: Play) -> None:
    """A job gives signs of life more rarely than others; a second one is started beside it."""
    play.job(replace(play.training, settings=replace(play.training.settings, heartbeat=60.0))).start()
    play.job(play.training).start()


def _orphan(play: Play) -> None:
    """What versions before have left: a folder of records under the name of those in an iteration folder."""
    root, disk = play.training.root, play.cluster.disks[SHARED]
    (run, step), = play.history.reported
    name = attempt_name(step, run)
    inner = f"{iteration_name(step)}/{FOLDER}/{name}"
    for path in ("", f"/{FOLDER}", f"/{FOLDER}/{name}"):
        disk.make_folder(f"{root}/{FOLDER}/{name}{path}")
    disk.create(f"{root}/{FOLDER}/{name}/{FOLDER}/{name}/{record_name(1)}", disk.find(f"{root}/{inner}/{record_name(1)}").data)
    disk.lose_power(lambda: True, lambda data: data)
    _one(play)


def _afresh(play: Play) -> None:
    """A new training in the folder of another one, on purpose."""
    play.history.protected = list(play.history.reported)
    _one(play)


def _with_reader(play: Play) -> None:
    """Beside a job somebody prunes the folder, and somebody reads the newest checkpoint."""
    _one(play)
    host = play.cluster.host("desk")
    play.cluster.process(host, "prune", lambda: _prune(play))
    play.cluster.process(host, "reader", lambda: _read(play))


def _readers(play: Play) -> None:
    """One process prunes, another one reads, and nobody saves."""
    play.cluster.process(play.cluster.host("desk"), "prune", lambda: _prune(play, (3, 2, 1), 0.0))
    play.cluster.process(play.cluster.host("desk2"), "reader", lambda: _read(play, 0.0))


def _prune(play: Play, keeps: tuple[int, ...] = (1, 1, 1), pause: float = 1.5) -> None:
    """As ``mindresume prune --keep-last KEEP`` does."""
    storage, root = Mount(play.cluster, running()), play.training.root
    for keep in keeps:
        here().scheduler.sleep(pause)
        made = plan(storage, root, KeepLast(keep), read_locks(storage, root), ended=ended(storage, root))
        carry_out(storage, root, made, ReadLocks(storage, root))


def _read(play: Play, pause: float = 0.8) -> None:
    """Chooses and reads as a conversion does, with a hold on what it reads: the newest, and the oldest by its name."""
    from mindresume.coordination.collectives import SingleProcess
    from mindresume.resume.selection_policy import SelectionPolicy, every_rank
    from mindresume.resume.shared_selection import select_shared
    from mindresume.simulation.jobs import wrong_content
    storage, training = Mount(play.cluster, running()), play.training
    for number in range(6):
        here().scheduler.sleep(pause)
        oldest = next(iter(scan_records(storage, training.root)[0][::-1]), None) if number % 2 else None
        named = oldest and oldest.first and (oldest.iteration_dir or os.path.basename(oldest.first.path))
        try:
            choice = select_shared(storage, training.root, SingleProcess(),
                            SelectionPolicy(training.ranks, named, ranks_to_verify=every_rank))
        except MissingCheckpointError:
            continue                                            # it was removed
        if choice.chosen is None:
            continue
        if choice.chosen.run is None:
            play.history.wrong.append(f"{choice.chosen.first} is taken for files without records")
            continue
        held = acquire_read_lock(storage, choice.root, choice.chosen.name, choice.chosen.commit_dir)
        if held is not None:
            try:
                play.history.wrong += wrong_content(storage, choice, list(range(training.ranks)))
            except FileNotFoundError as error:
                if not any(row.process == running().name and row.strike.kind in ("slow", "pause") for row in here().struck):
                    play.history.wrong.append(f"{choice.chosen.name} is held and was removed: {error}")
                raise
            held.release()


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in (
    Scenario("save", "two ranks save one step", lambda play: _core(play, (4,))),
    Scenario("prune", "they save two steps, and only the newest is kept", lambda play: _core(play, (4, 6), keep=1)),
    Scenario("replace", "they save one step, commit it, and remove the one before", lambda play: _core(play, (4,), keep=1)),
    Scenario("first", "a job in an empty folder", _one, past=None),
    Scenario("job", "a job goes on from a checkpoint, saves twice, keeps one", _one, Training(steps=6, keep=1)),
    Scenario("older", "a job may choose between two checkpoints", _one, Training(steps=8, keep=1), Training(steps=4)),
    Scenario("restarts", "a platform starts the job again and again", _restarted, Training(steps=8, keep=2)),
    Scenario("twice", "two jobs are started in one folder at the same time", _twice,
             Training(steps=6, keep=2)),
    Scenario("rare beats", "beside a job that seldom gives a sign of life another one is started", _rare_beats,
             Training(steps=6, keep=2, pace=25.0)),
    Scenario("same hosts", "a job is started again on its hosts, and once more when they have changed places", _exchanged,
             Training(hosts=2, steps=8, keep=2)),
    Scenario("orphan", "records of versions before lie under a name that is in use", _orphan, Training(steps=6, keep=1),
             formats=(ITERATION,)),
    Scenario("health", "the last checkpoints of a job are not healthy", _restarted,
             Training(steps=8, keep=1, monitored=True, sick=(6, 8)), Training(steps=2, monitored=True)),
    Scenario("two hosts", "a job on two hosts that share a disk", _one, Training(hosts=2, steps=6, keep=1)),
    Scenario("three ranks", "a job of three ranks goes on from a checkpoint of two", _one,
             Training(ranks=3, steps=6, keep=1, converts=True)),
    Scenario("nodes", "a job on two hosts that share no disk", _restarted,
             Training(hosts=2, steps=6, keep=1, apart=True), Training(hosts=2, steps=2, apart=True), FORMATS[:2]),
    Scenario("afresh", "a new training in the folder of another one", _afresh, Training(steps=4, keep=1, fresh=True)),
    Scenario("lost ranks", "ranks that are left save what they have", _one, Training(steps=6, keep=2, rescue=True)),
    Scenario("a reader", "one process prunes, another one reads", _readers, Training(steps=8, pruned=True), Training(steps=8),
             ways=("",)),
    Scenario("readers", "beside a job one process prunes, another one reads", _with_reader,
             Training(steps=6, keep=2, pruned=True)),
)}

"""Scenarios with partner copies: hosts whose memory is lost, hosts that change places or come back
with old saves, and a network that breaks, delays and garbles. And what must hold then:

- a record in memory names files with the recorded bytes, unless they have rotted
- a copy that its sender knows to be there stays until a newer one is whole
- a job takes nothing older than the newest save of which its hosts together hold all parts
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from mindresume.errors import RecordError
from mindresume.events import PartnerCopied
from mindresume.fault_injection.journal import Saved, save_order
from mindresume.model.manifest import FOLDER, parse_attempt, read_record, record_rank
from mindresume.saving.memory_tier.directory import MARK, PARTNER
from mindresume.typed import parse_json
from sim.cluster import SHARED, Host
from sim.disk import Disk, File
from sim.jobs import Job
from sim.oracle import INCONSISTENT, LOST, Finding
from sim.scenarios import Simulation
from sim.workloads import restarted

SPARE = 1  # hosts besides those of a job


class Part(NamedTuple):
    """What one rank has recorded of a save in memory. ``tier``: name of its folder. ``damage``: a
    file that is not as recorded; empty: none."""

    tier: str
    saved: Saved
    rank: int
    damage: str


@dataclass
class Start:
    """The memory of the hosts when a job starts. ``memories``: of its hosts. ``recoverable``: the
    newest save of which they hold all parts. ``gone``: copies of the job before that are not there
    any more, though no memory was lost, each with a text. ``at``: the operation; None: an earlier
    job was running."""

    job: Job
    memories: list[Disk]
    recoverable: Saved | None
    at: int | None
    findings: list[Finding] = field(default_factory=list)
    gone: list[tuple[Saved, str]] = field(default_factory=list)


def on_changing_hosts(sim: Simulation) -> None:
    """A platform restarts the command on hosts of a pool, which keep what lies in their memory. At
    each restart they may change places, and one that was left out may be back."""
    count, rng = sim.training.hosts, random.Random(sim.schedule.seed)
    hosts = [sim.cluster.host("", node) for node in range(count + SPARE)]
    starts: list[Start] = sim.starts

    def job_of(attempt: int) -> Job:
        chosen = hosts[:count]
        if attempt and rng.random() < 0.5:
            chosen = rng.sample(hosts, count)
        job = sim.job(sim.training, hosts=chosen)
        alive = any(not process.dead for other in sim.jobs[:-1] for process in other.ranks)
        start = Start(
            job,
            [host.shm for host in chosen],
            _recoverable(sim, chosen),
            None if alive else sim.cluster.at,
        )
        if not sim.cluster.rots:
            start.findings += _damaged(hosts)
            start.gone += _gone(starts[-1]) if starts and not alive else []
        starts.append(start)
        return job

    restarted(sim, job_of)


def check(sim: Simulation) -> list[Finding]:
    """Checks the run."""
    found: list[Finding] = []
    for start in sim.starts:
        found += start.findings
        runs = [process.own.target.run for process in start.job.ranks if _has_opened(process)]
        # a fault after the start may be why it does not get a part
        if start.at is None or not runs or _struck(sim, start):
            continue
        held = [(start.recoverable, "its hosts held all parts")] if start.recoverable else []
        chosen = sim.history.chosen.get(runs[0], start.recoverable)
        found += [
            Finding(LOST, f"{start.job.name} takes {chosen}, and not {saved}: {why}")
            for saved, why in held + start.gone
            if chosen is None or save_order(chosen) < save_order(saved)
        ]
    if not sim.cluster.rots:
        found += _damaged(sim.cluster.hosts)
    return found[:1]


def _has_opened(process: object) -> bool:
    own = process.own  # type: ignore[attr-defined]
    return own is not None and own.session is not None


def _struck(sim: Simulation, start: Start) -> bool:
    """Returns whether a fault struck after ``start``, before the next job."""
    index = sim.starts.index(start)
    later = sim.starts[index + 1 :]
    until = later[0].at if later and later[0].at is not None else None
    return any(
        row.number >= start.at and (until is None or row.number <= until)
        for row in sim.cluster.injected
    )


def _recoverable(sim: Simulation, hosts: Sequence[Host]) -> Saved | None:
    mark = sim.cluster.disks[SHARED].find(f"{sim.training.root}/{FOLDER}/{MARK}")
    if not isinstance(mark, File):
        return None
    token = parse_json(mark.data)["token"]
    ranks: dict[Saved, set[int]] = {}
    for host in hosts:
        for part in _parts(host.shm):
            if not part.damage and part.tier.removesuffix(PARTNER) == token:
                ranks.setdefault(part.saved, set()).add(part.rank)
    whole = [saved for saved, found in ranks.items() if len(found) == sim.training.ranks]
    return max(whole, key=save_order, default=None)


def _damaged(hosts: Sequence[Host]) -> Iterator[Finding]:
    for host in hosts:
        for part in _parts(host.shm):
            if part.damage:
                yield Finding(
                    INCONSISTENT,
                    f"{host.name}: {part.tier} has a record of rank {part.rank} of {part.saved}, "
                    f"and {part.damage} is not as recorded",
                )


def _gone(before: Start) -> Iterator[tuple[Saved, str]]:
    """Yields the copies of the job before that are gone, though their hosts have lost no memory."""
    job, count = before.job, len(before.job.hosts)
    per_host = -(-job.training.ranks // count)
    for node in range(count):
        process = job.ranks[node * per_host] if job.ranks else None
        steps = [
            event.step
            for _, event in (process.events if process is not None else ())
            if isinstance(event, PartnerCopied)
        ]
        keeper = (node + 1) % count
        if not steps or job.hosts[keeper].shm is not before.memories[keeper]:
            continue
        told = process.own.target.run, max(steps)
        of_node = set(range(node * per_host, (node + 1) * per_host))
        there: dict[Saved, set[int]] = {}
        for part in _parts(job.hosts[keeper].shm):
            if part.tier.endswith(PARTNER) and not part.damage:
                there.setdefault(part.saved, set()).add(part.rank)
        if not any(
            save_order(saved) >= save_order(told) and of_node <= ranks
            for saved, ranks in there.items()
        ):
            yield (
                told,
                f"{job.hosts[node].name} knew that {job.hosts[keeper].name} has it, which now "
                f"keeps {sorted(there)}",
            )


def _parts(disk: Disk) -> Iterator[Part]:
    """Yields what is recorded in memory."""
    for path, file in disk.walk():
        folder, _, name = path.rpartition("/")
        attempt = parse_attempt(folder.rpartition("/")[2])
        rank = record_rank(name)
        if attempt is None or rank is None:
            continue
        base = folder.rpartition(f"/{FOLDER}/")[0]
        tier = path.removeprefix("/").split("/")[3]
        step, run = attempt
        try:
            record = read_record(io.BytesIO(file.data))
        except RecordError:
            yield Part(tier, (run, step), rank, name)
            continue
        damage = ""
        for row in record.files:
            found = disk.find(f"{base}/{row.path}")
            if not isinstance(found, File) or xxh3_128_hexdigest(found.data) != row.checksum:
                damage = row.path
        yield Part(tier, (run, step), rank, damage)

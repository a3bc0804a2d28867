"""Below the seam: the system calls of a real process that saves, by strace. The seam's own drill
cannot see whether ``fsync`` is really called, on which file, and what the kernel's answers do to
the code above it.

First the order of the calls alone. Then every call of a save once more, killed in it or failing
with an error of the disk, and the oracle of the drill says what a resume takes: the previous or the
new checkpoint, bit by bit. ``-s`` shows the table.
"""

import errno
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest

from mindresume.fault_injection.faults import FaultInjector, Scheduler
from mindresume.fault_injection.scenarios import PASS, RUNS, Sandbox, check_resume
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_tensor
from st.strace import TRACED, Call, Order, read_trace, role
from st.syscall_job import REPORTED, shard_of
from st.training_run import ROOT

PAST, STEP, NEXT = 10, 20, 30
TOGETHER = 2  # jobs at a time
PATIENCE = 120.0  # seconds
KILL, FOR_GOOD = "KILL", "+"  # "EIO+": this call and all later ones of its name
IGNORED_ERRORS = ("EOPNOTSUPP",)  # space cannot be reserved there

# kind of call -> errors that a local disk, a full or a remote one gives
ERRORS = {
    "open": ("EIO", "ESTALE", "ENOSPC", "EDQUOT"),
    "write": ("EIO", "ESTALE", "ENOSPC", "EDQUOT"),
    "fallocate": ("EIO", "ENOSPC", "EDQUOT", "EOPNOTSUPP"),
    "fsync": ("EIO", "ESTALE", "ENOSPC", "EDQUOT"),
    "close": ("EIO", "EDQUOT"),
    "rename": ("EIO", "ESTALE", "ENOSPC", "EDQUOT"),
    "mkdir": ("EIO", "ESTALE", "ENOSPC", "EDQUOT"),
    "unlink": ("EIO", "ESTALE"),
    "rmdir": ("EIO", "ESTALE"),
}
READING = ("EIO", "ESTALE")  # of an open for reading


@dataclass(frozen=True)
class Setup:
    """``saver``: foreground, thread, process. ``first``: into an empty folder."""

    format: str
    saver: str
    first: bool = False

    def __str__(self) -> str:
        return f"{self.saver}, {self.format}{', first' if self.first else ''}"

    @property
    def past(self) -> int | None:
        return None if self.first else PAST


SETUPS = (
    Setup("safetensors", "foreground"),
    Setup("ckpt", "foreground"),
    Setup("safetensors", "foreground", first=True),
    Setup("safetensors", "thread"),
    Setup("ckpt", "process"),
)


@dataclass(frozen=True)
class Cell:
    """One injection. ``number``: of the calls of this name that touch the folder, from 1.
    ``saved``: the reported result of the step. ``problems``: empty if the cell passes."""

    setup: str
    fault: str
    call: str
    name: str
    number: int
    status: int
    saved: bool | None
    chosen: str
    verdict: str
    problems: tuple[str, ...]


CELLS: list[Cell] = []
COUNTED = str(ROOT / "st" / "programs" / "counted")  # names are the same in every run


# ---- the job under strace ------------------------------------------------------------------------


class Job:
    """``inject``: an expression of strace. ``paths``: only calls that touch one of them are shown
    and counted; empty: all calls. The folder's parent is ``base``; the trace is relative to it."""

    def __init__(
        self,
        base: Path,
        setup: Setup,
        steps: list[int],
        width: int = 1,
        inject: str = "",
        paths: Sequence[str] = (),
    ):
        self.base, self.said, self._trace = base, [], base / "trace"
        # Without a filter in the kernel for kills: strace 6.1 loses a signal that it injects at a
        # stop of that filter.
        fast = ["--seccomp-bpf"] if "signal" not in inject else []
        filters = [word for path in paths for word in ("-P", str(base / path))]
        self._process = subprocess.Popen(
            [
                "strace",
                "-f",
                *fast,
                "-y",
                "-s",
                "0",
                "-o",
                str(self._trace),
                "-e",
                f"trace={TRACED}",
                *filters,
                *(["-e", f"inject={inject}"] if inject else []),
                sys.executable,
                "-m",
                "st.syscall_job",
                str(base / "checkpoint"),
                setup.format,
                setup.saver,
                str(width),
                *map(str, steps),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": COUNTED,
            },
        )

    def next(self) -> dict:
        """Returns the result of the next step; {} if the job ended without one."""
        ready = select.select([self._process.stdout], [], [], PATIENCE)[0]
        line = self._process.stdout.readline() if ready else ""
        if line:
            self.said.append(json.loads(line))
            return self.said[-1]
        return {}

    def go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Returns (exit status, its error message). AssertionError if it hangs."""
        try:
            out, err = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as late:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            raise AssertionError(f"the job hangs: {self._process.args}") from late
        self.said += map(json.loads, out.splitlines())
        return self._process.returncode, err

    def calls(self) -> list[Call]:
        return read_trace(self._trace.read_text(), str(self.base))


@pytest.fixture(scope="module")
def strace() -> str:
    """Returns its version. A machine without strace fails, one that forbids tracing skips."""
    if shutil.which("strace") is None:
        pytest.fail(
            "strace is missing: apt-get install strace (scripts/test.sh does that as root), or "
            "leave these tests out: --ignore st/test_syscalls.py"
        )
    tried = subprocess.run(
        ["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode and "Operation not permitted" in tried.stderr:
        pytest.skip(f"this kernel or container forbids ptrace: {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr
    return subprocess.run(
        ["strace", "-V"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]


@pytest.fixture()
def base(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    CELLS.clear()
    yield
    print(f"\n{table(CELLS)}")


def table(cells: list[Cell]) -> str:
    """Returns how many calls were struck, by setup, fault, and what a resume then took."""
    counts = Counter(
        (cell.setup, cell.fault, cell.chosen, "wrong" if cell.problems else "right")
        for cell in cells
    )
    return "\n".join(f"{count:5}  {', '.join(row)}" for row, count in sorted(counts.items()))


# ---- without faults: the order -------------------------------------------------------------------


def prepare(base: Path, setup: Setup) -> Path:
    """``base`` with the folder of checkpoints in which step 10 is committed."""
    base.mkdir(parents=True, exist_ok=True)
    if not setup.first:
        world_of(base, setup).save_without_faults(0, PAST)
    return base


def clean(base: Path, setup: Setup, steps: list[int], width: int = 1) -> list[Call]:
    """Returns the calls of a run without faults."""
    job = Job(prepare(base, setup), setup, steps, width)
    for _ in steps[1:]:
        assert job.next().get("saved")
        job.go_on()
    status, error = job.end()
    assert status == 0 and [said["saved"] for said in job.said] == [True] * len(steps), (
        status,
        job.said,
        error,
    )
    return job.calls()


@pytest.mark.parametrize("width", [1, PosixStorage.width])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_call_comes_after_the_calls_it_relies_on(strace, base, setup, width):
    """Bytes are flushed before a file gets its name; the name is flushed before the next file
    refers to it: weights, record, manifest, meta.json; a removal follows after something newer is
    durable. No final name is ever written to."""
    calls = clean(base, setup, [STEP, NEXT], width)
    order = Order(calls, setup.past)
    assert order.broken == [] and order.unfinished([STEP, NEXT]) == []
    kinds = Counter(call.kind for call in calls if call.changes)
    assert kinds["fsync"] >= 2 * (2 * 4 + 1), (
        "of every step: four files, four folders after them, the name of the attempt"
    )
    assert not {"truncate", "link"} & set(kinds)


def is_flushed_twice(before: list[Call], call: Call) -> bool:
    """Returns whether the call flushes what nothing has changed since it was flushed."""
    for one in reversed(before if call.kind == "fsync" else []):
        if one.kind == "fsync" and one.path == call.path:
            return True
        if call.path in (one.path, os.path.dirname(one.path), os.path.dirname(one.to)):
            return False
    return False


def test_the_rules_detect_every_wrong_order(strace, base):
    """The rules detect every flush that is left out, and every file that gets its name one call too
    early."""
    setup = Setup("safetensors", "foreground")
    calls = [call for call in clean(base, setup, [STEP, NEXT]) if call.changes and not call.error]
    # The folder of a record is flushed by its rank, and by rank 0 before the manifest; that of the
    # manifest also before the removal: one of the two would do.
    calls = [call for index, call in enumerate(calls) if not is_flushed_twice(calls[:index], call)]

    def wrong(changed: list[Call]) -> bool:
        order = Order(changed, PAST)
        return bool(order.broken or order.unfinished([STEP, NEXT]))

    assert not wrong(calls)
    for index, call in enumerate(calls):
        without = calls[:index] + calls[index + 1 :]
        if call.kind in ("fsync", "rename"):
            assert wrong(without), f"{call} is missing"
        if call.kind == "fsync":
            failed = replace(call, result=-1, error="EIO")
            assert wrong(calls[:index] + [failed] + calls[index + 1 :]), (
                f"{call} failed and all went on"
            )
            if role(call.path).kind == "temporary" or role(calls[index - 1].to).kind in (
                "weights",
                "record",
                "manifest",
                "meta",
            ):
                assert wrong(calls[:index] + [failed, call] + calls[index + 1 :]), (
                    f"{call} failed and was simply tried again"
                )
        if call.kind == "rename" and calls[index - 1].kind == "fsync":
            assert wrong(without[: index - 1] + [call] + without[index - 1 :]), (
                f"{call} is too early"
            )
        if call.kind == "open":
            final = replace(call, path="checkpoint/rank_0/meta.json")
            assert wrong(calls[:index] + [final] + calls[index:])


# ---- every call of a save, struck ----------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Call number ``number`` of its name among those that touch one of ``paths``. ``early``: before
    step 20 counts as saved."""

    call: Call
    number: int
    paths: tuple[str, ...]
    early: bool


@pytest.fixture(scope="module")
def targets(strace, tmp_path_factory) -> Callable[[Setup], list[Target]]:
    @lru_cache
    def find(setup: Setup) -> list[Target]:
        both = clean(tmp_path_factory.mktemp("clean").resolve(), setup, [STEP, NEXT])
        assert len({call.task for call in both}) == 1, "strace counts calls by thread"
        paths = dict.fromkeys(path for call in both for path in (call.path, call.to) if path)
        paths = tuple(
            {**paths, **dict.fromkeys(path.replace(f"{STEP:010}", f"{PAST:010}") for path in paths)}
        )
        calls = clean(tmp_path_factory.mktemp("clean").resolve(), setup, [STEP])
        assert list(map(str, both[: len(calls)])) == list(map(str, calls)), (
            "the calls of a save are not always the same"
        )
        attempt = next(
            call.path for call in calls if call.kind == "mkdir" and f"{STEP:010}" in call.path
        )
        recorded = [
            index
            for index, call in enumerate(calls)
            if call.kind == "fsync" and call.path == attempt
        ][0]
        seen: Counter[str] = Counter()
        found = []
        for index, call in enumerate(calls):
            seen[call.name] += 1
            found.append(Target(call, seen[call.name], paths, index <= recorded))
        return found

    return find


def strike_all(
    base: Path, setup: Setup, strikes: list[tuple[Target, str]], act: Callable[..., Cell]
) -> None:
    """Each strike in a copy of the same folder; AssertionError lists what went wrong."""
    template = prepare(base / "template", setup)

    def one(item: tuple[int, tuple[Target, str]]) -> Cell:
        number, (target, fault) = item
        own = base / f"cell-{number}"
        shutil.copytree(template, own)
        cell = act(own, setup, target, fault)
        if not cell.problems:
            shutil.rmtree(own)
        return cell

    with ThreadPoolExecutor(TOGETHER) as pool:
        cells = list(pool.map(one, enumerate(strikes)))
    CELLS.extend(cells)
    wrong = [
        f"{cell.fault} in call {cell.number} of {cell.name}, {cell.call}: "
        f"{'; '.join(cell.problems)}"
        for cell in cells
        if cell.problems
    ]
    assert not wrong, "\n".join([table(cells), *wrong])
    assert len(cells) >= 5, "hardly anything was struck"


def world_of(base: Path, setup: Setup) -> Sandbox:
    return Sandbox(
        FaultInjector(PosixStorage(), Scheduler(1, random.Random(0))),
        str(base / "checkpoint"),
        setup.format,
        1,
    )


def look(sandbox: Sandbox, setup: Setup, tidy: bool) -> tuple[str, str, list[str]]:
    """(verdict, what a resume takes, problems)."""
    past = [] if setup.first else [(RUNS[0], PAST)]
    found = check_resume(sandbox, past, tidy=tidy)
    problems = [] if found.verdict == PASS else [f"{found.verdict}: {found.reason}"]
    problems += [f"left behind: {', '.join(found.left)}"] if found.left else []
    step = found.chosen[1] if found.chosen else None
    if found.verdict == PASS and not tidy and step in (STEP, NEXT):
        problems += differing(sandbox, step)
    return found.verdict, {PAST: "previous", STEP: "new", NEXT: "next"}.get(step, "none"), problems


def differing(sandbox: Sandbox, step: int) -> list[str]:
    """Returns tensors that are not bit-identical to those of the job. The oracle checks only the
    small ones."""
    (saved,) = shard_of(
        SaveTarget(PosixStorage(), sandbox.root, RUNS[0], 0, 1), step, sandbox.format
    ).files
    path = os.path.join(sandbox.root, saved.path)
    with open(path, "rb") as file:
        header = read_header(file, path)
        return [
            f"{name} of step {step} is not what was saved"
            for name, array in saved.tensors.items()
            if name not in header.tensors
            or read_tensor(file, header.tensors[name]).tobytes() != array.tobytes()
        ]


def killed(base: Path, setup: Setup, target: Target, fault: str) -> Cell:
    """Sends SIGKILL in this call. With a writer process that process is killed, and the training
    must report it."""
    job = Job(
        base,
        setup,
        [STEP],
        inject=f"{target.call.name}:signal=KILL:when={target.number}",
        paths=target.paths,
    )
    status, error = job.end()
    calls, said = job.calls(), {line["step"]: line for line in job.said}
    order, problems = Order(calls, setup.past), []
    struck = [call for call in calls if call.result is None]
    if [str(call) for call in struck] != [str(target.call)]:
        problems.append(f"not this call was struck: {[str(call) for call in struck]}")
    saved = said[STEP]["saved"] if STEP in said else None
    if setup.saver != "process" and status != -signal.SIGKILL:
        problems.append(f"exit status {status}: {error}")
    if setup.saver == "process" and (status, saved) not in ((REPORTED, False), (0, True)):
        problems.append(
            f"the training did not report its writer's death: exit status {status}, {job.said}, "
            f"{error}"
        )
    sandbox = world_of(base, setup)
    if order.recorded(STEP) or saved:
        sandbox.journal.report((RUNS[0], STEP), 0)
    return finish(sandbox, setup, target, fault, status, saved, order.broken + problems)


def failing(base: Path, setup: Setup, target: Target, fault: str) -> Cell:
    """Makes the call return an error, once or from here on. The job continues: it reports the step
    that was not saved, and saves the next one."""
    name, for_good = fault.removesuffix(FOR_GOOD), fault.endswith(FOR_GOOD)
    when = f"{target.number}{FOR_GOOD if for_good else ''}"
    job = Job(
        base,
        setup,
        [STEP, NEXT],
        inject=f"{target.call.name}:error={name}:when={when}",
        paths=target.paths,
    )
    sandbox, problems = world_of(base, setup), []
    saved = job.next().get("saved")
    if saved:
        sandbox.journal.report((RUNS[0], STEP), 0)
    chosen, wrong = "none", []
    if saved is not None:
        _, chosen, wrong = look(sandbox, setup, tidy=False)
        job.go_on()
    status, error = job.end()
    said = {line["step"]: line for line in job.said}
    if saved is None or NEXT not in said:
        return finish(
            sandbox, setup, target, fault, status, saved, [f"exit status {status}: {error}"]
        )
    if said[NEXT]["saved"]:
        sandbox.journal.report((RUNS[0], NEXT), 0)
    elif not for_good:
        problems.append(f"step {NEXT} was not saved: {said[NEXT]['error']}")
    calls = job.calls()
    struck = [call for call in calls if call.injected]
    if not struck or str(struck[0]) != str(target.call) or (len(struck) > 1 and not for_good):
        problems.append(f"not this call was struck: {[str(call) for call in struck]}")
    if status != (0 if saved and said[NEXT]["saved"] else REPORTED):
        problems.append(f"exit status {status}: {error}")
    problems += [
        *wrong,
        *Order(calls, setup.past).broken,
        *unreported(target, name, saved, job.said),
    ]
    return finish(sandbox, setup, target, fault, status, saved, problems, chosen)


def unreported(target: Target, name: str, saved: bool, said: list[dict]) -> list[str]:
    """Returns problems: a change that failed must be reported, and a step that is not durable must
    not count as saved. A failed read may be reported: the file counts as absent then, and nothing
    is removed that would otherwise stay."""
    if name in IGNORED_ERRORS:
        return [] if saved else [f"not saved for {name}, which is no reason"]
    problems, reason = [], os.strerror(getattr(errno, name))
    if target.early and target.call.changes and saved:
        problems.append(f"step {STEP} counts as saved")
    if not target.early and not saved:
        problems.append(f"step {STEP} was saved, but does not count as saved")
    texts = [text for line in said for text in (line["error"] or "", *map(str, line["events"]))]
    if target.call.changes and not any(reason in text for text in texts):
        problems.append(f"not reported: {said}")
    return problems


def finish(
    sandbox: Sandbox,
    setup: Setup,
    target: Target,
    fault: str,
    status: int,
    saved: bool | None,
    problems: list[str],
    chosen: str = "",
) -> Cell:
    """Checks the folder, then lets the next run save and clean up, and checks it again."""
    _, found, wrong = look(sandbox, setup, tidy=False)
    verdict, _, after = look(sandbox, setup, tidy=True)
    return Cell(
        str(setup),
        fault,
        str(target.call),
        target.call.name,
        target.number,
        status,
        saved,
        chosen or found,
        verdict,
        (*problems, *wrong, *after),
    )


def some(strikes: list[tuple[Target, str]], setup: Setup, soak: bool) -> list[tuple[Target, str]]:
    """A part of all, without --soak: each setup has others, all setups together have each."""
    return strikes if soak else strikes[SETUPS.index(setup) :: len(SETUPS)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_kill_in_every_changing_call_is_survived(targets, base, setup, soak):
    strikes = [(target, KILL) for target in targets(setup) if target.call.changes]
    strike_all(base, setup, some(strikes, setup, soak), killed)


def faults(target: Target) -> tuple[str, ...]:
    if target.call.kind == "open" and not target.call.writing:
        return READING
    return ERRORS[target.call.kind]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_an_error_in_every_call_is_survived(targets, base, setup, soak):
    """One saver gets every error, also in calls that only read; the others get EIO in calls that
    change something, and a full disk in those that write."""
    found = targets(setup)
    if setup == SETUPS[0]:
        strikes = [(target, fault) for target in found for fault in faults(target)]
    else:
        strikes = [(target, "EIO") for target in found if target.call.changes]
        full = (
            [target for target in found if target.call.kind in ("write", "fallocate")]
            if setup.saver == "foreground"
            else []
        )
        strikes += [(target, "ENOSPC") for target in full]
    strikes = [(target, fault) for target, fault in strikes if not harmless(target)]
    strike_all(base, setup, some(strikes, setup, soak), failing)


def harmless(target: Target) -> bool:
    """The end of reading: nothing can be lost."""
    return target.call.kind == "close" and not target.call.path.endswith("mindresume-tmp")


def test_a_permanent_disk_error_is_survived(targets, base, soak):
    """Full from here on, or broken from here on; every second call, without --soak."""
    found = targets(SETUPS[0])
    strikes = [(target, "ENOSPC+") for target in found if target.call.kind == "write"]
    strikes += [(target, "EIO+") for target in found if target.call.kind == "fsync"]
    strike_all(base, SETUPS[0], strikes if soak else strikes[::2], failing)

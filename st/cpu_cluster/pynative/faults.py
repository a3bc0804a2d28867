"""Ends this process with SIGKILL at an exact place of a PyNative training, or breaks its gradients.

What: three variables of the environment. RANK may be ``all``.

CPU_CLUSTER_KILL=RANK@STEP
    at the end of that step, after all callbacks: the step is recorded, a save of it is complete
        (unless asynchronous)
CPU_CLUSTER_KILL_IN_SAVE=RANK@STEP:N
    before the N-th (from 1) file operation below ``checkpoint.save_path`` after the training of
    that step, counted in all threads. Operations are those that Python reports to audit hooks: open
    for writing, rename, remove, mkdir, rmdir, chmod, rmtree, link. A safetensors file is written by
    compiled code and counts once it is renamed or its mode is changed.
CPU_CLUSTER_NAN=STEP,STEP,...
    in these steps the norm of all gradients is NaN, with which mindformers >= 2.1.0 skips the
    optimizer (``training.use_skip_step_on_nan``)

Before it ends, the process prints what it was about to do.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

CHANGES = frozenset(
    {
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.rmdir",
        "os.chmod",
        "os.truncate",
        "os.link",
        "os.symlink",
        "shutil.rmtree",
    }
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Place:
    """The text ``RANK@STEP:REST`` of one variable. ``is_due``: the step is trained, and the process
    is of that rank."""

    step = -1  # that this process has trained; one for all places
    begin = 0  # the step from which this process resumed

    def __init__(self, text: str) -> None:
        self.rank, _, after = text.partition("@")
        number, _, self.rest = after.partition(":")
        if not number.isdigit() or not (self.rank == "all" or self.rank.isdigit()):
            raise ValueError(f"{text!r}: expected RANK@STEP or all@STEP at the beginning")
        self.at = int(number)

    @property
    def is_here(self) -> bool:
        return self.rank in ("all", os.environ.get("RANK_ID", "0"))

    @property
    def is_due(self) -> bool:
        return self.is_here and Place.step >= self.at


def end_process(reason: str) -> None:
    """Ends this process as a crash would."""
    os.write(1, f"cpu_cluster: killed itself {reason}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


class SaveKill:
    """Counts file operations below ``folder`` and ends the process before operation number
    ``count``."""

    def __init__(self, place: Place) -> None:
        self.place, self.left, self.folder = place, int(place.rest), None

    def is_change(self, event: str, arguments: tuple) -> bool:
        """Returns whether an audit event changes something below the folder. Paths relative to an
        open folder are those of rmtree."""
        if event == "open":
            path, flags = arguments[0], arguments[2]
            if not flags & WRITING:
                return False
        elif event in CHANGES:
            path = arguments[0]
            if len(arguments) > 1 and event in ("os.remove", "os.rmdir") and arguments[1] != -1:
                return True
        else:
            return False
        return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(
            os.fsdecode(path)
        ).startswith(self.folder)

    def audit(self, event: str, arguments: tuple) -> None:
        if self.folder is None or event != "open" and event not in CHANGES or not self.place.is_due:
            return
        if self.is_change(event, arguments):
            self.left -= 1
            if self.left == 0:
                end_process(f"after step {Place.step}, before {event} {arguments[0]!r}")


def break_gradients(steps: frozenset[int]) -> None:
    """Makes the norm of the gradients NaN in these steps."""
    import mindspore as ms
    from mindformers.pynative.trainer import trainer

    norm = trainer._calculate_global_grad_norm

    @functools.wraps(norm)
    def broken(*args: Any, **options: Any) -> Any:
        found = norm(*args, **options)
        return (
            (ms.Tensor(float("nan"), ms.float32), *found[1:])
            if max(Place.step, Place.begin) + 1 in steps
            else found
        )

    trainer._calculate_global_grad_norm = broken


def install() -> None:
    """After ``import mindformers`` and the recorder, before the plug-in under test. Raises
    ValueError for a variable that it cannot read."""
    from mindformers.pynative.trainer.trainer import CallbackHandler

    at_end, in_save = (os.environ.get(f"CPU_CLUSTER_KILL{end}") for end in ("", "_IN_SAVE"))
    at_end = Place(at_end) if at_end else None
    in_save = SaveKill(Place(in_save)) if in_save else None
    if in_save is not None:
        sys.addaudithook(in_save.audit)
    if steps := os.environ.get("CPU_CLUSTER_NAN"):
        break_gradients(frozenset(map(int, steps.split(","))))
    call_event = CallbackHandler.call_event

    def call_event_and_kill(self, event, args, state, **values):
        if event == "on_train_begin":
            Place.begin = int(state.global_step)
        if event == "on_step_end":
            Place.step = int(state.global_step)
            if in_save is not None:
                in_save.folder = os.path.join(os.path.abspath(args.checkpoint.save_path), "")
        result = call_event(self, event, args, state, **values)
        if event == "on_step_end" and at_end is not None and at_end.is_due:
            if at_end.rank == "all":
                from ..recorder import wait_for_records  # imports mindspore

                wait_for_records(Place.step)
            end_process(f"at the end of step {Place.step}")
        return result

    CallbackHandler.call_event = call_event_and_kill

"""Reads a training and advises how often it should save: ``mindresume.advise``."""
from __future__ import annotations

import os
from collections.abc import Iterable

from mindresume.report.advice import Advice, advice_from
from mindresume.report.builder import Report, build_report, folders_of
from mindresume.report.measurement import TooLittleMeasuredError, measure
from mindresume.storage.posix import PosixStorage


def advise(path: str | os.PathLike[str], *, logs: Iterable[str | os.PathLike[str]] = ()) -> Advice:
    """Advises how often a training should save.

    Args:
        path: The output folder of the training, with its logs, event files and checkpoint folder; or the folder above it, or the
            checkpoint folder.
        logs: Other folders with logs or event files.

    Returns:
        An Advice. Nothing is written.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        TooLittleMeasuredError: No save, no step, or no time of training was measured.
    """
    output, root = folders_of(os.fspath(path))
    built = build_report(PosixStorage(), output, root, [os.fspath(folder) for folder in logs])
    return advice_from(measure(built.accounts, output), output)


def advice_of(report: Report) -> Advice | None:
    """Returns the advice for a report; None if too little was measured."""
    try:
        return advice_from(measure(report.accounts, report.output), report.output)
    except TooLittleMeasuredError:
        return None

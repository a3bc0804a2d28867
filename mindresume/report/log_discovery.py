"""Finds the log files of a training: those of mindformers (``log/rank_R/info.log``, rotated) and those of the workers.

    output/log[_SUFFIX]/rank_0/info.log.2, info.log.1, info.log      all starts, one after the other
    output/msrun_log[_SUFFIX]/worker_0.log                           output of the last start; the next one overwrites it
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LOG, _WORKERS, _WORKER = re.compile(r"log(_.+)?"), re.compile(r"msrun_log(_.+)?"), re.compile(r"worker_(\d{1,9})\.log")
_RANK, _INFO = re.compile(r"rank_(\d{1,9})"), re.compile(r"info\.log(?:\.(\d{1,6}))?")
LOOKED_FOR = ("log*/rank_*/info.log*", "msrun_log*/worker_*.log")


@dataclass(frozen=True)
class LogFile:
    """Describes one log. ``pieces``: its files in order of time: rotated files, oldest first, then the current one. ``rank``:
    from its name."""
    rank: int
    pieces: tuple[str, ...]


def find_logs(folders: Iterable[str]) -> tuple[LogFile, ...]:
    """Returns the logs in each of ``folders`` (output folders, or folders of logs), in order of rank."""
    found: dict[tuple[str, ...], LogFile] = {}
    for folder in folders:
        for log in (*_of_folder(folder), *(log for name in _names(folder) if _LOG.fullmatch(name) or _WORKERS.fullmatch(name)
                                           for log in _of_folder(os.path.join(folder, name)))):
            found.setdefault(tuple(os.path.realpath(piece) for piece in log.pieces), log)
    return tuple(sorted(found.values(), key=lambda log: (log.rank, log.pieces)))


def _of_folder(folder: str) -> Iterator[LogFile]:
    for name in _names(folder):
        path = os.path.join(folder, name)
        if match := _WORKER.fullmatch(name):
            if os.path.isfile(path):
                yield LogFile(int(match[1]), (path,))
        elif match := _RANK.fullmatch(name):
            pieces = [(int(piece[1] or 0), piece[0]) for piece in map(_INFO.fullmatch, _names(path)) if piece]
            paths = tuple(os.path.join(path, piece) for _, piece in sorted(pieces, reverse=True))
            if paths:
                yield LogFile(int(match[1]), paths)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

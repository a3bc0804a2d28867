"""Worker processes that never outlive this one.

    with Workers(2, folder) as workers:
        for result in workers.map(function, arguments): ...         # in the order of completion

The end of the block, by completion, Ctrl-C or an error, ends the workers at once and removes
``folder``. If this process is killed, each worker ends by itself, and a small shell process that
waits for that removes ``folder``. ``folder`` is optional.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from mindresume import runtime

# `read` ends with an error when the other end of the pipe is gone; workers may still be in a file
# operation for a moment.
_CLEANER = 'read -r word && exit 0; for n in 1 2 3 4 5; do rm -rf -- "$0"; sleep 0.3; done'


class Workers:
    """A pool of ``count`` processes, started by spawn, so that no thread or lock of this process is
    copied into them."""

    def __init__(self, count: int, folder: str | None = None):
        self.count, self.folder = count, folder
        self._cleaner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:
        if self.folder is not None:
            self._cleaner = subprocess.Popen(
                ["sh", "-c", _CLEANER, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes, self._connections = [], []
        context = multiprocessing.get_context("spawn")
        try:
            with _later():
                for _ in range(self.count):
                    ours, theirs = context.Pipe()
                    self._connections.append(ours)
                    process = context.Process(target=_work, args=(theirs,), daemon=True)
                    process.start()
                    self._processes.append(process)
                    theirs.close()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._cleaner is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._cleaner.communicate(b"done\n")

    def map(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> Iterator[Any]:
        """Yields the results in the order of completion. ``function``: a function at the top level
        of a module; its exceptions are raised here. Raises ChildProcessError if a worker dies."""
        left, busy = iter(arguments), set()
        # there may be fewer, or more
        for connection, argument in zip(self._connections, left, strict=False):
            connection.send((function, argument))
            busy.add(connection)
        while busy:
            for connection in wait(list(busy)):
                try:
                    error, result = connection.recv()
                except (EOFError, ConnectionError):
                    raise ChildProcessError(
                        "a worker process of the drill died; was it killed for its memory?"
                    ) from None
                if error is not None:
                    raise error
                busy.discard(connection)
                for argument in islice(left, 1):
                    connection.send((function, argument))
                    busy.add(connection)
                yield result


@contextmanager
def _later() -> Iterator[None]:
    """Delays signals until the end of the block: a process that is half started would end with a
    traceback."""
    caught: list[int] = []
    # inherited: Ctrl-C in the terminal is ours to handle
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with runtime.interrupts_to(lambda number, frame: caught.append(number)):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if caught:
        signal.raise_signal(caught[0])


def _work(connection: Connection) -> None:
    runtime.Thread(target=_end_with_parent, daemon=True).start()
    # the parent is gone; the thread may not have noticed yet
    with suppress(EOFError, ConnectionError):
        while True:
            function, argument = connection.recv()
            try:
                answer = None, function(argument)
            except Exception as error:  # any error: the parent raises it
                answer = error, None
            connection.send(answer)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)

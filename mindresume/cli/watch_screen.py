"""Draws the history of a folder of checkpoints on a terminal, fitted to its height: ``mindresume ls --watch``."""
from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mindresume import runtime
from mindresume.api.results import CheckpointInfo, DirectoryUser
from mindresume.cli.common import CHECKPOINT_COLUMNS, RIGHT_ALIGNED, checkpoint_cells, new_table, step_text
from mindresume.cli.watch import (
    CHANGED,
    COMMITTED,
    COMPLETED,
    JOB,
    NEW,
    NOTES,
    REMOVED,
    WHOLE,
    History,
    Key,
    error_sentence,
    rows_of,
)
from mindresume.coordination.lease import SAVING
from mindresume.formatting import listed, ranks_count, shown, size_text, span_text

_STYLES = {NEW: "bold green", COMPLETED: "bold green", COMMITTED: "bold green", CHANGED: "bold yellow", REMOVED: "strike red"}
_MEMORY_ROWS, _TEXTS = 3, 4     # rows of the memory tier, and lines on problems and notes, at most
_FEW = 4                        # rows that the disk gets first on a low terminal
_LEAVE = "\x1b[?25h\x1b[?1049l"                  # shows the cursor, and leaves the alternate screen
_SLOW = 1.0                     # seconds: a longer look is mentioned


class Screen:
    """Shows a history in the alternate screen of a terminal, which is left as it was at the end of the ``with`` block."""
    tick = 1.0

    def __init__(self, path: str, every: float, console: Console | None = None):
        self._path, self._every = path, every
        self._console = console or Console(markup=False, emoji=False, highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Screen:
        try:
            self._live.start()
            self._live.update(Text(f"{shown(self._path)}: looking ..."), refresh=True)
        except BaseException:                   # Ctrl-C just now
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        try:
            self._live.stop()
        except BaseException:                   # Ctrl-C again, or a text that rich still holds and cannot write
            self._console.file.write(_LEAVE)
            self._console.file.flush()
            raise

    def show(self, history: History, now: float, is_different: bool) -> None:
        self._live.update(frame(history, self._path, self._every, now, self._console.height), refresh=True)


def frame(history: History, path: str, every: float, now: float, height: int) -> RenderableType:
    """Returns what fills a terminal of ``height`` lines."""
    head, texts = list(_head(history, path, every, now)), list(_texts(history))
    listing = history.listing
    memory = rows_of(listing, "memory")
    left = height - len(head) - 2                                # an empty line above the table, the heading of the table
    most = min(_TEXTS, max(left - _FEW, 0))
    if len(texts) > most:
        texts[max(most - 1, 0):] = [_line(f"{len(texts) - most + 1} more lines: mindresume ls {path}")] if most else []
    left -= len(texts)
    in_memory = min(len(memory), _MEMORY_ROWS, max(left - _FEW - 2, 0))
    left -= in_memory + 2 if in_memory else 0
    parts: list[RenderableType] = [*head]
    if listing is not None:
        rows, before = rows_of(listing, "disk"), rows_of(history.before, "disk")
        if rows or before:
            parts += [_line(""), *_table(rows, before, history, left)]
        else:
            parts += [_line(""), _line("no checkpoints yet")]
        if in_memory:
            parts += [_line("memory (this node): lost with the node", "bold"),
                      *_table(memory, rows_of(history.before, "memory"), history, in_memory)]
    return Group(*parts, *texts)


def _line(text: str, style: str = "") -> Text:
    return Text(shown(text), style=style, no_wrap=True, overflow="ellipsis", end="\n")


# ---- above the table -------------------------------------------------------------------------------------------------

def _head(history: History, path: str, every: float, now: float) -> Iterator[Text]:
    listing, found = history.listing, history.observation
    slow = f"; a look takes {span_text(history.seconds)}" if history.seconds > _SLOW else ""
    yield _line(f"{path if listing is None else listing.root}    {_clock(now)}, every {every:g} s{slow}; Ctrl-C ends", "bold")
    if history.error:
        yield _line(error_sentence(history, path), "bold red")
    if found is None or listing is None:
        return
    changed = {change.kind for change in history.changes}
    jobs = [user for user in listing.in_use_by if user.holder.purpose == SAVING]
    if not jobs:
        yield _line("no job saves here now", "bold yellow" if JOB in changed else "")
    for user in listing.in_use_by:
        style = "bold red" if user.alive is False else "bold green" if JOB in changed else ""
        state = {True: "alive", False: "dead, the next job takes over the folder", None: "on another machine"}[user.alive]
        yield _line(f"{user.holder.purpose}: {user.holder}: {state}", style)
        progress = _progress_text(user, history, now) if user.holder.purpose == SAVING else ""
        if progress:
            yield _line(f"  {progress}", "bold yellow" if history.silence(user.holder.run) else "")
    run = next((user.holder.run for user in jobs if user.alive is not False), None)
    yield _line(_saves_text(history, run, now))
    for save in found.saves:
        missing = sorted(set(range(save.world_size)) - set(save.recorded_ranks))
        of = f" of {ranks_count(save.world_size)}" if save.world_size else ""
        there = f"{len(save.recorded_ranks)}{of} recorded" if save.recorded_ranks else "no rank has recorded its files yet"
        yield _line(f"saving step {save.step}: {there}" + (f", missing: rank {listed(missing)}" if missing else ""), "cyan")
    yield _line(_space_text(history))


def _clock(seconds: float) -> str:
    return runtime.strftime("%H:%M:%S", runtime.localtime(seconds))


def _span(seconds: float) -> str:
    """Returns whole seconds as text: no digit changes faster than the screen."""
    return f"{max(seconds, 0):.0f} s" if seconds < 10 else span_text(seconds)


def _progress_text(user: DirectoryUser, history: History, now: float) -> str:
    parts = []
    beat, speed = history.heartbeat(user.holder.run), history.speed(user.holder.run)
    step = beat[0].step if beat else user.holder.step
    if step:
        parts.append(f"step {step}")
    if speed is not None:
        parts.append(f"{speed:.3g} steps/s")
    if beat and beat[0].every:
        since, silence = "" if beat[1] is None else f", {_span(now - beat[1])} ago", history.silence(user.holder.run)
        late = f", no new one for {_span(silence)}" if silence else ""
        parts.append(f"heartbeat {beat[0].count}{since} (every {beat[0].every:g} s){late}")
    return ", ".join(parts)


def _saves_text(history: History, run: str | None, now: float) -> str:
    last = history.last_save()
    if last is None:
        return "last save: none yet"
    since = "" if last.saved_at is None else f", {_span(now - last.saved_at)} ago"
    text = f"last save: step {step_text(last.step)}{since}"
    following = history.next_save(run, now) if run is not None else None
    if following is not None:
        step, seconds = following
        text += f"; next: step {step}"
        text += "" if seconds is None else f", in about {_span(seconds)}" if seconds else ", due now"
    return text


def _space_text(history: History) -> str:
    free = history.observation.free_bytes if history.observation else None
    last = history.last_save()
    if free is None:
        return "disk: free space is not known"
    room = f": room for {free // last.size_bytes} more of {size_text(last.size_bytes)}" if last and last.size_bytes else ""
    return f"disk: {size_text(free)} free{room}"


# ---- the table -------------------------------------------------------------------------------------------------------

def _table(rows: dict[Key, CheckpointInfo], before: dict[Key, CheckpointInfo], history: History, most: int
           ) -> Iterator[RenderableType]:
    """Yields a table of the first ``most`` lines: the rows, and where they were those that have just been removed."""
    kinds = {change.key: change.kind for change in history.changes if change.key}
    above, removed = None, {}                   # {row above them, None for the first: rows that have just been removed}
    for key in before:
        if key in rows:
            above = key
        elif kinds.get(key) == REMOVED:
            removed.setdefault(above, []).append(key)
    order = [*removed.get(None, ()), *(item for key in rows for item in (key, *removed.get(key, ())))]
    visible = order if len(order) <= most else order[:max(most - 1, 1)]
    table = new_table(CHECKPOINT_COLUMNS, RIGHT_ALIGNED)
    for key in visible:
        row, kind = rows.get(key) or before[key], kinds.get(key, "")
        *cells, state = map(shown, checkpoint_cells(row))
        said = [kind] if kind not in ("", COMPLETED) else []         # the latter: its state says it
        marks = [state, *said, *(["see below"] if row.warnings and kind != REMOVED else [])]
        plain = "yellow" if row.problem or row.warnings else ""
        table.add_row(*cells, ", ".join(marks), style=_STYLES.get(kind, plain))
    yield table
    if len(visible) < len(order):
        hidden = [before[key] if key not in rows else rows[key] for key in order[len(visible):]]
        bad = sum(row.state not in WHOLE for row in hidden)
        yield _line(f"and {len(hidden)} older" + (f", of these {bad} not complete" if bad else ""), "dim")


def _texts(history: History) -> Iterator[Text]:
    """Yields lines on problems and notes."""
    listing = history.listing
    if listing is None:
        return
    saving = {(save.step, save.run_id) for save in history.observation.saves} if history.observation else set()
    for row in (*listing.checkpoints, *listing.memory):
        if row.problem and (row.step, row.run_id) not in saving:
            yield _line(f"step {step_text(row.step)}: {row.problem.reason}", "yellow")
        for text in row.warnings:
            yield _line(f"step {step_text(row.step)}: {text}", "yellow")
    style = "bold" if any(change.kind == NOTES for change in history.changes) else ""
    yield from (_line(note, style) for note in listing.notes)

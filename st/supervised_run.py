"""Starts a training under ``mindresume run`` and tells its starts apart: one attempt of ``Run``,
several starts."""

import sys
from typing import Any

from st.run_attempts import events, recorded
from st.training_run import ROOT, Run


def supervised(
    run: Run,
    *options: str,
    extra: str = "--load_checkpoint ./output/checkpoint --resume_training True",
    **environment: str,
) -> Run:
    """Starts the run under the supervisor. Its processes are descendants of the supervisor, as they
    were of the launcher."""
    return run.start(
        extra,
        prefix=(sys.executable, "-m", "mindresume", "run", "--events", "output", *options, "--"),
        PYTHONPATH=str(ROOT),
        **environment,
    )


def supervisor_events(run: Run, kind: str) -> list[dict[str, Any]]:
    """Returns the events of this kind that the supervisor has recorded so far; a torn last line is
    left out."""
    found = recorded((run.folder / "output" / "mindresume_events").glob("*-supervisor_*.jsonl"))
    return [event for event in found if event["event"] == kind]


class Start:
    """One start of the command, ``number`` from 1: what it did until the next one began."""

    def __init__(self, run: Run, number: int):
        self.run, self.number = run, number
        began = [event["time"] for event in supervisor_events(run, "job_started")]
        self.began: float = began[number - 1]
        self.end: float = began[number] if len(began) > number else float("inf")

    def has(self, time_s: float) -> bool:
        return self.began <= time_s < self.end

    def steps(self) -> list[dict[str, Any]]:
        """Returns the steps that it recorded."""
        return [row for row in self.run.steps(-1) if self.has(row["time"])]

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [row for row in events(self.run, kind, rank) if self.has(row["time"])]

    def in_memory(self) -> set[int]:
        """Returns the steps that all ranks have saved in memory."""
        return set.intersection(
            *(
                {row["step"] for row in self.events("tier_saved", rank)}
                for rank in range(self.run.workers)
            )
        )

    def resumed(self) -> int:
        """Returns the step that it continued after; 0 for none."""
        return max((row["step"] for row in self.events("checkpoint_selected")), default=0)

    def source(self) -> str | None:
        """Returns "memory" or "disk"; "nothing" for a fresh start, None if it ended before it
        selected anything."""
        if self.events("fresh_start"):
            return "nothing"
        found = self.events("checkpoint_selected")
        return found[0]["source"] if found else None


def number_of_starts(run: Run) -> int:
    return len(supervisor_events(run, "job_started"))

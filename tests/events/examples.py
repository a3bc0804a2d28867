"""The examples of every event in docs/events.md. ``PYTHONPATH=.:tests python -m events.examples``
writes the tables of docs/events.md and docs/events.zh.md: as the event file and the log have them
now. The first example of a kind that ``recorded.jsonl`` has is the event of a real training; a new
event begins with a row of its kind and its JSON, and any text for the log."""

import json
import re
from pathlib import Path

from mindresume import events as ev
from mindresume.formatting import shown

DOCS = Path(__file__).parents[2] / "docs"
# one event of each kind that a supervised training of two ranks wrote, seconds rounded; logs and
# commands shortened
RECORDED = Path(__file__).with_name("recorded.jsonl")
# {page: heads of its table, and the text of an event without a line in the log}
WORDS = {
    "events.md": (("event", "in the event file, and in the log"), "(not logged)"),
    "events.zh.md": (("事件", "事件文件中，以及日志中"), "（不写入日志）"),
}
BEGIN, END = "<!-- examples: made by tests/events/examples.py -->", "<!-- end of examples -->"
ROW = re.compile(r"(?m)^\| `(\w+)` \| (.*) \|$")
JSON = re.compile(r"(?:^|<br>)`(\{.*?\})`(?=<br>)")


def recorded() -> dict[str, ev.Event | None]:
    """Returns {kind: event} of the recording."""
    rows = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    return {row["event"]: ev.event_from_json(row) for row in rows}


def examples() -> list[list[ev.Event | None]]:
    """Returns the examples of each kind: the English page has them as the event file would. None:
    one that is no event."""
    made = (DOCS / "events.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    real, found = recorded(), []
    for kind, cell in ROW.findall(made):
        written = [
            ev.event_from_json({"event": kind, **json.loads(values)})
            for values in JSON.findall(cell)
        ]
        first = [real[kind]] if kind in real else []
        found.append([*first, *(event for event in written if event not in first)])
    return found


EXAMPLES = [event for events in examples() for event in events]


def table(page: str) -> str:
    """Returns the table of a page: event, then its lines in the event file and in the log."""
    heads, not_logged = WORDS[page]
    rows = [f"| {' | '.join(heads)} |", "|---|---|"]
    for events in examples():
        lines = []
        for event in events:
            values = {key: value for key, value in event.to_json().items() if key != "event"}
            log = f"{event.log_level.upper()} {event.line()}" if event.line() else not_logged
            lines += [f"`{json.dumps(values)}`", shown(log, keep="\n").replace("\n", "<br>")]
        rows.append(f"| `{events[0].kind}` | {'<br>'.join(lines)} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Returns the text of a page with the current table."""
    before, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table(page)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in WORDS:
        (DOCS / name).write_text(with_table(name), encoding="utf-8")

"""Makes the part of docs/monitoring.md: the table of metrics."""

from __future__ import annotations

import json
from pathlib import Path

from mindresume.events.metrics import METRICS, PREFIX, SOURCES, parts_of

SOURCE = "mindresume/events/metrics.py"
CHINESE = json.loads(Path(__file__).with_name("metrics.zh.json").read_text(encoding="utf-8"))
HEADS = {
    "en": ("metric", "meaning", "values of the label", "events"),
    "zh": ("指标", "含义", "标签的取值", "事件"),
}


def part(language: str) -> str:
    """Returns the part of the page in "en" or "zh"."""
    rows = ["| " + " | ".join(HEADS[language]) + " |", "|---" * 4 + "|"]
    for row, text in METRICS.items():
        name, label, values = parts_of(row)
        meaning, _, sources = text.partition(SOURCES)
        kinds = sorted({source.partition(".")[0] for source in sources.split()})
        cells = (
            f"`{PREFIX}{name}{{{label}}}`" if label else f"`{PREFIX}{name}`",
            meaning if language == "en" else CHINESE[name],
            ", ".join(f"`{value}`" for value in values if value),
            ", ".join(f"`{kind}`" for kind in kinds),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)

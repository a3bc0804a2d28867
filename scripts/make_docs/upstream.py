"""Makes the part of docs/upstream.md: what mindresume wraps, overrides, calls and reads of
mindformers and MindSpore, for each feature. upstream.zh.json has the Chinese texts of features."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mindresume.mindformers.upstream import (
    FEATURES,
    MINDFORMERS,
    MINDSPORE,
    PYNATIVE,
    Kind,
    Symbol,
)

SOURCE = "mindresume/mindformers/upstream.json"
CHINESE = json.loads(Path(__file__).with_name("upstream.zh.json").read_text(encoding="utf-8"))
CHANGED = (Kind.WRAPPED, Kind.REPLACED)
TEXTS = {
    "en": {
        "counts": ("package", "functions wrapped", "methods replaced", "methods overridden")
        + ("called", "read", "internal names"),
        "packages": ("mindformers", "MindSpore", "the PyNative trainer"),
        "heads": ("wrapped or replaced", "since", "until"),
        "others": "Overridden, called or read ({}): ",
        "comma": ", ",
        "without": "Without it: {}.",
        "needed": "Needed: without it the installation is refused.",
        "nothing": "Nothing is wrapped.",
    },
    "zh": {
        "counts": ("软件包", "包装的函数", "替换的方法", "重写的方法", "调用", "读取", "内部名称"),
        "packages": ("mindformers", "MindSpore", "动态图（PyNative）Trainer"),
        "heads": ("包装或替换的符号", "起始版本", "终止版本"),
        "others": "重写、调用或读取（{} 个）：",
        "comma": "、",
        "without": "缺少时：{}。",
        "needed": "必需：缺少时拒绝安装。",
        "nothing": "没有包装任何符号。",
    },
}


def part(language: str) -> str:
    """Returns the part of the page in "en" or "zh"."""
    texts = TEXTS[language]
    tables = dict(zip(texts["packages"], (MINDFORMERS, MINDSPORE, PYNATIVE), strict=True))
    blocks = [
        _table(
            texts["counts"],
            (
                (
                    package,
                    *(str(len({row.path for row in rows if row.kind is kind})) for kind in Kind),
                )
                for package, rows in tables.items()
            ),
        )
    ]
    rows = [row for table in tables.values() for row in table]
    for feature in FEATURES.values():
        own = [row for row in rows if row.feature is feature]
        name, without = (
            CHINESE.get(text, text) if language == "zh" else text
            for text in (feature.name, feature.without)
        )
        blocks += [f"### {name}", *_feature(own, without, texts)]
    return "\n\n".join(blocks)


def _feature(rows: list[Symbol], without: str, texts: dict[str, tuple[str, ...]]) -> Iterable[str]:
    yield str(texts["without"]).format(without) if without else str(texts["needed"])
    changed = [row for row in rows if row.kind in CHANGED]
    if changed:
        yield _table(
            texts["heads"],
            ((f"`{row.path}`", row.since, row.until) for row in _once(changed)),
        )
    else:
        yield str(texts["nothing"])
    others = sorted({f"`{row.path}`" for row in rows if row.kind not in CHANGED})
    if others:
        yield str(texts["others"]).format(len(others)) + str(texts["comma"]).join(others)


def _once(rows: list[Symbol]) -> list[Symbol]:
    """Returns the newest row of each symbol: older ones have another signature."""
    return list({row.path: row for row in rows}.values())


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (tuple(heads), *map(tuple, rows))]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count("|") - 1), *lines[1:]])

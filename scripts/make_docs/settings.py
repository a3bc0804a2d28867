"""Makes the part of docs/settings.md: one table for each section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import Field, is_dataclass
from pathlib import Path
from typing import Any

from mindresume.settings import Settings, settings_of, variable_of

SOURCE = "mindresume/settings.py"
CHINESE = json.loads(Path(__file__).with_name("settings.zh.json").read_text(encoding="utf-8"))
TEXTS = {
    "en": {
        "heads": ("setting", "default", "unit or choices", "meaning", "environment variable"),
        "section": "section, below",
        "title": "The section",
    },
    "zh": {
        "heads": ("配置项", "默认值", "单位或可选值", "含义", "环境变量"),
        "section": "一段配置，见下",
        "title": "配置段",
    },
}


def part(language: str) -> str:
    """Returns the part of the page in "en" or "zh"."""
    texts = TEXTS[language]
    blocks = []
    for name, kind in sections():
        if name != "mindresume":
            blocks.append(f"### {texts['title']} `{name.partition('.')[2]}`")
        blocks.append(_table(name, kind, language))
    return "\n\n".join(blocks)


def sections() -> Iterator[tuple[str, type]]:
    """Yields the sections: their keys with dots between them, and their dataclasses."""
    yield "mindresume", Settings
    for field in settings_of(Settings):
        if is_dataclass(field.default):
            yield f"mindresume.{field.name}", type(field.default)


def meaning(name: str, field: Field[Any], language: str) -> str:
    """Returns the meaning of a setting; KeyError: it has no translation. ``name``: its keys with
    dots between them."""
    return (
        field.metadata["meaning"]
        if language == "en"
        else CHINESE["meanings"][name.partition(".")[2]]
    )


def _default(field: Field[Any]) -> str:
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _table(section: str, kind: type, language: str) -> str:
    rows = ["| " + " | ".join(TEXTS[language]["heads"]) + " |", "|---" * 5 + "|"]
    for field in settings_of(kind):
        name = f"{section}.{field.name}"
        is_section = is_dataclass(field.default)
        cells = (
            f"`{field.name}`",
            TEXTS[language]["section"] if is_section else f"`{_default(field)}`",
            "" if is_section else _unit(field, language),
            meaning(name, field, language).replace("|", "\\|"),
            "" if is_section else f"`{variable_of(name)}`",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _unit(field: Field[Any], language: str) -> str:
    unit = field.metadata["unit"]
    if field.metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    return unit if language == "en" else CHINESE["units"][unit]

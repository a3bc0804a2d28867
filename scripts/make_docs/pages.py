"""Lists the pages with a generated part."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.make_docs import commands, metrics, settings, upstream
from scripts.make_docs.marks import with_part

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {  # {page: (source that its mark names, maker of the part)}
    "settings.md": (settings.SOURCE, lambda: settings.part("en")),
    "settings.zh.md": (settings.SOURCE, lambda: settings.part("zh")),
    "command_reference.md": (commands.SOURCE, lambda: commands.part("en")),
    "command_reference.zh.md": (commands.SOURCE, lambda: commands.part("zh")),
    "monitoring.md": (metrics.SOURCE, lambda: metrics.part("en")),
    "monitoring.zh.md": (metrics.SOURCE, lambda: metrics.part("zh")),
    "upstream.md": (upstream.SOURCE, lambda: upstream.part("en")),
    "upstream.zh.md": (upstream.SOURCE, lambda: upstream.part("zh")),
}


def made(name: str) -> str:
    """Returns the page as it should be: what is outside of the marks stays. Links of a Chinese
    page lead to Chinese pages."""
    source, part = PAGES[name]
    text = part()
    if name.endswith(".zh.md"):
        text = re.sub(r"\]\((\w+)\.md", r"](\1.zh.md", text)
    return with_part((DOCS / name).read_text(encoding="utf-8"), source, text)

"""Finds and replaces the generated part of a page."""

from __future__ import annotations

END = "<!-- end of the generated part -->"


def begin(source: str) -> str:
    """Returns the line before the part that is made from ``source``."""
    return f"<!-- made from {source} by: python -m scripts.make_docs -->"


def with_part(page: str, source: str, part: str) -> str:
    """Returns ``page`` with ``part`` as the part that is made from ``source``. Raises ValueError if
    the page has no marks for it."""
    before, mark, rest = page.partition(begin(source))
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page lacks the lines {begin(source)!r} and {END!r}")
    return f"{before}{mark}\n\n{part.strip()}\n\n{end}{after}"

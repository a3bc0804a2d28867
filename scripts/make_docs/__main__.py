"""Rewrites the pages whose generated part is not what its source says now, and prints their
names."""

from __future__ import annotations

from scripts.make_docs.pages import DOCS, PAGES, made

for name in PAGES:
    page = DOCS / name
    text = made(name)
    if page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
        print(f"rewrote {page}")

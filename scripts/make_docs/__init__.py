"""Writes the generated parts of the guide: ``python -m scripts.make_docs``.

A generated part stands in a page between two marks, and is committed. tests/test_make_docs.py
compares it with its source:

    settings             the dataclasses in mindresume/settings.py, and settings.zh.json for their
                         Chinese meanings
    command_reference    the commands and their help (mindresume/cli), and commands.zh.json
    upstream             the table of upstream symbols (mindresume/mindformers/upstream.json), and
                         upstream.zh.json

The tables of two other pages have commands of their own: docs/events.md (tests/events/examples.py)
and docs/releases.md (st/release_table.py).
"""

"""docs/api.md: its examples run and give the printed results, and it names the whole API."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import mindresume
from mindresume.api.inspection import ComparedCheckpoint
from mindresume.api.maintenance import PrunedCheckpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
EXPECTED = re.compile(r"^(\s*)(.*?)\s+# => (.*)$")


def checked(block):
    """Returns the code with each ``EXPRESSION  # => VALUE`` as a call of ``check``."""
    lines = []
    for line in block.splitlines():
        found = EXPECTED.match(line)
        lines.append(
            f"{found[1]}check({found[2]!r}, ({found[2]}), {found[3]!r})" if found else line
        )
    return "\n".join(lines)


def test_the_examples_run(training, monkeypatch, capsys):
    monkeypatch.chdir(training)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    checks = []

    def check(code, value, text):
        checks.append(code)
        assert repr(value) == text, code

    names = {"check": check}
    for block in blocks:
        exec(compile(checked(block), str(PAGE), "exec"), names)
    assert len(blocks) > 10 and len(checks) == sum(block.count("# => ") for block in blocks) > 40
    assert "there are: 300, 400, 500" in capsys.readouterr().out


def test_every_name_of_the_api_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in mindresume.__all__ if not re.search(rf"\b{name}\b", page)]
    assert missing == []


def test_every_key_is_on_the_page():
    rows = dict(
        re.findall(r"^\| `(\w+)` \| .*? \| (`.*`.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    )
    named = [getattr(mindresume, name) for name in mindresume.__all__ if name in rows]
    results = [*filter(is_dataclass, named), ComparedCheckpoint, PrunedCheckpoint]
    assert len(results) > 15
    for result in results:
        keys = set(re.findall(r"`(\w+)`", rows[result.__name__]))
        # the fields of a holder stand among those of its user
        assert {field.name for field in fields(result)} - {"holder"} <= keys, result

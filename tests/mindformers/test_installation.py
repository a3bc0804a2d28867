"""Work that waits for the import of a module; calls of what is wrapped."""

import importlib
import sys

import pytest

from mindresume.mindformers.installation import tell_neighbours, when_imported
from mindresume.mindformers.patches import Call, wrapper


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(text): writes a module of this test and returns its name. It is not imported yet."""
    names = []
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)

    def written(text):
        name = f"module_of_the_test_{len(names)}_{tmp_path.name.replace('-', '_')}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return name

    yield written
    sys.meta_path[:] = finders
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_that_is_imported_already(module):
    name, calls = module("value = 1"), []
    importlib.import_module(name)
    when_imported(name, lambda: calls.append(1))
    assert calls == [1]


def test_a_module_that_is_imported_later(module):
    name, calls, before = module("value = 1"), [], list(sys.meta_path)
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    when_imported(name, lambda: calls.append("twice"))
    assert calls == []
    assert importlib.import_module(name).value == 1 and calls == [1]
    assert sys.meta_path == before
    importlib.import_module(name)
    assert calls == [1]


def test_a_module_of_a_package_and_its_neighbours(module, tmp_path):
    package = module("raise AssertionError")
    folder = tmp_path / f"{package}_package"
    folder.mkdir()
    for name in ("__init__", "first", "second"):
        (folder / f"{name}.py").write_text("", encoding="utf-8")
    calls = []
    when_imported(f"{folder.name}.second", lambda: calls.append(1))
    importlib.import_module(f"{folder.name}.first")
    assert calls == []
    importlib.import_module(f"{folder.name}.second")
    assert calls == [1]


def test_an_import_that_fails_and_then_succeeds(module, tmp_path):
    name, calls = module("raise OSError('not yet')"), []
    when_imported(name, lambda: calls.append(1))
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module(name)
    assert calls == [] and name not in sys.modules
    (tmp_path / f"{name}.py").write_text("other = 12345", encoding="utf-8")
    importlib.invalidate_caches()
    assert importlib.import_module(name).other == 12345 and calls == [1]


def test_work_that_fails_is_the_error_of_the_import_and_is_tried_again(module):
    name, calls = module("value = 1"), []

    def work():
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("another signature")

    when_imported(name, work)
    with pytest.raises(ValueError, match="another signature"):
        importlib.import_module(name)
    assert name not in sys.modules
    importlib.import_module(name)
    assert calls == [1, 1]


def test_a_module_that_does_not_exist_stays_absent():
    before = list(sys.meta_path)
    try:
        when_imported("no_such_module_of_the_test", lambda: pytest.fail("called"))
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module_of_the_test")
    finally:
        sys.meta_path[:] = before


def test_arguments_by_name():
    def function(first, second=2, *, third=3, **kwargs):
        return first, second, third, kwargs

    call = Call(function, (1,), {"more": 4})
    assert call.arguments == {"first": 1, "second": 2, "third": 3, "kwargs": {"more": 4}, "more": 4}
    assert (call.holder, call()) == (1, (1, 2, 3, {"more": 4}))
    assert call(third=5) == (1, 2, 5, {"more": 4})
    assert wrapper(lambda call, second, fourth=4: call(first=second + fourth))(function)(1) == (
        6,
        2,
        3,
        {},
    )
    with pytest.raises(TypeError):
        wrapper(lambda call, first: first)(function)()


@pytest.mark.parametrize(
    "asked, level", [("{RSC:1}", "info"), ("{RSC:1,ARF:1}", "warning"), ("", None)]
)
def test_a_start_tells_what_else_takes_part_in_a_recovery(current, monkeypatch, asked, level):
    events = []
    monkeypatch.setattr(type(current), "emit", lambda self, event: events.append(event))
    tell_neighbours({"MS_ENABLE_TFT": asked})
    assert [event.level for event in events] == [level] * (level is not None)
    if level == "warning":
        assert "MS_ENABLE_TFT ARF" in events[0].text and "remove ARF:1" in events[0].text

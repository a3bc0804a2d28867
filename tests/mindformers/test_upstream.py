"""The table of upstream symbols: it is complete, it fits the installed release, and what does not
fit is reported at once."""

import ast
import functools
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

import mindresume

PACKAGE = Path(mindresume.__file__).parent
ROOT = PACKAGE.parent
ENTERING = [
    *sorted((PACKAGE / "mindformers").rglob("*.py")),
    PACKAGE / "plugin.py",
    ROOT / "run_mindformer.py",
]

pytest.importorskip("mindformers.tools")

from mindresume.errors import ConfigError  # noqa: E402
from mindresume.events import SaveWritten  # noqa: E402
from mindresume.mindformers import installation, patches, training_context, upstream  # noqa: E402
from mindresume.mindformers.upstream import PROFILES, TENSORBOARD, Kind, Profile, Symbol  # noqa: E402

INSTALLED = next(profile for profile in PROFILES if profile.versions["mindformers"] == "1.9.0")
PATHS = {symbol.path for symbol in (*upstream.MINDFORMERS, *upstream.MINDSPORE, *upstream.PYNATIVE)}


# ---- the table is complete -----------------------------------------------------------------------


def of_upstream(module):
    return module.split(".")[0] in ("mindformers", "mindspore")


def names_used(tree):
    """Returns dotted paths of everything of mindformers and mindspore that a module imports or uses
    from its imports."""
    imported, used = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if of_upstream(alias.name):
                    imported[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    used.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and of_upstream(node.module):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.add(f"{node.module}.{alias.name}")
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        parts, base = [], node
        while isinstance(base, ast.Attribute):
            parts, base = [base.attr, *parts], base.value
        if parts and isinstance(base, ast.Name) and base.id in imported and id(node) not in inner:
            used.add(".".join([imported[base.id], *parts]))
    return used


def uncovered(tree):
    """Returns names that are neither a row nor the beginning of one (a module, a class)."""
    return sorted(
        name
        for name in names_used(tree) - PATHS
        if not any(path.startswith(f"{name}.") for path in PATHS)
    )


def test_everything_that_is_used_is_a_row_and_other_modules_use_nothing():
    for path in (*ENTERING, *PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path in ENTERING:
            assert uncovered(ast.parse(text)) == [], path
        elif "mindformers" in text or "mindspore" in text:
            assert names_used(ast.parse(text)) == set(), path


def test_uses_without_a_row_are_found():
    program = (
        "import mindspore as ms\nfrom mindspore import context, nn\nfrom mindformers.trainer "
        "import utils\n"
        "ms.get_seed(); ms.reset_seed(); context.set_context(mode=1); nn.Cell.compile; "
        "utils.other(1)"
    )
    assert uncovered(ast.parse(program)) == [
        "mindformers.trainer.utils.other",
        "mindspore.context.set_context",
        "mindspore.reset_seed",
    ]


def test_only_the_plugin_itself_installs_when_it_is_imported():
    """The other modules can be imported without a change in mindformers: what they run is
    definitions."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for path in ENTERING:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        others = [ast.unparse(node) for node in statements[1:] if not isinstance(node, allowed)]
        expected = {
            "plugin.py": ["install()"],
            "examination.py": 1,
            "run_mindformer.py": 1,
            "transform_worker.py": 1,
        }.get(path.name, [])
        assert others == expected or len(others) == expected, path


def test_every_wrapped_row_has_a_wrapper_and_every_wrapper_a_row():
    wrapped = {
        symbol.name
        for profile in upstream.PROFILES
        for symbol in profile.symbols
        if symbol.is_wrapped
    }
    assert wrapped == set(patches.WRAPPERS)


@pytest.mark.parametrize("module", ["mindformers.upstream", "mindformers.transform_worker"])
def test_listed_modules_import_neither_mindformers_nor_mindspore(module):
    """The table, and the worker processes of ``transform_engine: mindspore``."""
    program = (
        f"import sys, mindresume.{module}; "
        "print({name.split('.')[0] for name in sys.modules} & {'mindformers', 'mindspore'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_no_row_twice():
    rows = [(symbol.path, symbol.kind) for symbol in INSTALLED.symbols]
    assert len(rows) == len(set(rows))


# ---- the installed release -----------------------------------------------------------------------


def test_the_installed_release_matches_the_table():
    """Also after the installation: a wrapper has the signature of the wrapped function."""
    assert upstream.profile_for(upstream.installed_versions()) == (INSTALLED, "")
    assert upstream.check(INSTALLED.symbols) == []
    assert upstream.require(INSTALLED) == (frozenset(), [])


@pytest.mark.parametrize(
    "versions, of, untested",
    [
        ({"mindformers": "1.9.1", "mindspore": "2.9"}, "1.9.0", []),
        ({"mindformers": "1.8.0", "mindspore": "2.7.2"}, "1.8.0", []),
        ({"mindformers": "2.1.0", "mindspore": "2.10.0"}, "2.1.0", []),
        ({"mindformers": "2.1.0rc1", "mindspore": "2.11.0"}, "2.1.0", ["mindspore 2.11.0"]),
        ({"mindformers": "1.90.0", "mindspore": "2.9.0"}, "1.9.0", ["mindformers 1.90.0"]),
        (
            {"mindformers": "3.0.0", "mindspore": "3.0.0"},
            "2.1.0",
            ["mindformers 3.0.0", "mindspore 3.0.0"],
        ),
    ],
)
def test_a_release_gets_the_profile_of_the_newest_one_that_is_not_newer(versions, of, untested):
    profile, notice = upstream.profile_for(versions)
    assert profile.versions["mindformers"] == of and bool(notice) is bool(untested)
    assert all(text in notice for text in untested)
    too_old = "mindformers 1.7.9 is installed; mindresume needs 1.8.0 or newer"
    with pytest.raises(ConfigError, match=too_old):
        upstream.profile_for({"mindformers": "1.7.9", "mindspore": "2.7.1"})


def test_what_mindformers_has_only_later_is_off_and_refused(monkeypatch):
    oldest = PROFILES[0]
    off, notices = upstream.require(Profile(oldest.versions, ()))
    assert off == {upstream.CHECKPOINT_SECTION, upstream.PRETRAINED} and len(notices) == 1
    monkeypatch.setattr(upstream, "_off", set(off))
    with pytest.raises(ConfigError, match="section checkpoint:.*use_legacy_format"):
        upstream.refuse_if_off(upstream.CHECKPOINT_SECTION)
    upstream.refuse_if_off(upstream.TENSORBOARD)


# ---- a release that differs ----------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    """Returns a module that replaces one of mindformers."""
    made = types.ModuleType("mindformers_of_the_test")

    def load(path, network, optimizer=None):
        """Has another parameter than expected."""

    class Trainer:
        def __init__(self):
            self.config = None

        @classmethod
        def get(cls, name):
            """Has the expected signature."""

    class Child(Trainer):
        """Inherits ``get``."""

    made.load, made.Trainer, made.Child = load, Trainer, Child
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def row(name, signature=None, kind=Kind.WRAPPED, feature=upstream.FEATURES["saving"]):
    return Symbol("mindformers_of_the_test", name, signature, kind, feature, "1.9.0", "")


def profile_of(*rows):
    return Profile(INSTALLED.versions, rows)


OF_LOAD = "path, network, optimizer=None"


@pytest.mark.parametrize(
    "symbol, found",
    [
        (row("load", OF_LOAD), "as expected"),
        (row("Trainer.get", "cls, name", Kind.REPLACED), "as expected"),
        (row("Trainer.config"), "as expected"),
        (row("Child.get", "cls, name", Kind.CALLED), "as expected"),
        (row("Trainer"), "as expected"),
        (row("load", "path, cell, optimizer=None"), OF_LOAD),
        (row("gone", "path"), None),
        (row("Trainer.gone"), None),
        (row("NoSuchClass.train", "self"), None),
        (row("Child.get", "cls, name", Kind.REPLACED), None),
        (row("load", "path, network, optimizer"), OF_LOAD),
        (row("load", "path, network"), OF_LOAD),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_different_signature_is_a_finding(module, symbol, found):
    findings = upstream.check([symbol])
    assert [(finding.symbol, finding.found) for finding in findings] == (
        [] if found == "as expected" else [(symbol, found)]
    )


@pytest.mark.parametrize(
    "expected, found, compatible",
    [
        ("checkpoint", "checkpoint, require_optimizer=True", True),
        ("a, b=1", "a, b=2", True),
        ("a, b", "a, b=2", True),
        ("a, **kwargs", "a, b=1, **kwargs", True),
        ("a", "a, *args, **kwargs", True),
        ("a", "a, b", False),
        ("a, b=1", "a, b", False),
        ("a, b", "b, a", False),
        ("a, b=1", "a", False),
        ("a, **kwargs", "a", False),
        ("a", "unknown", False),
        ("", "a=1", True),
        ("a, b=1", "a, *args, **kwargs", True),
        ("a, b", "a, *args, **kwargs", False),
        ("a, b=1", "a, *args", False),
    ],
)
def test_signatures_are_compared_for_compatibility(expected, found, compatible):
    assert upstream._compatible(expected, found) is compatible


def test_only_names_that_a_wrapper_looks_up_matter():
    for found in ("file, network", "path, cell", "network, path", "file, network, more", "file"):
        fits = upstream._compatible("path, network", found, ("network",))
        assert fits is (found == "file, network"), found


def test_a_renamed_parameter_that_a_wrapper_passes_on_switches_nothing_off(module):
    module.get_resume_checkpoint = lambda folder, resume: None
    symbol = row("get_resume_checkpoint", "checkpoint_dir, resume")
    assert upstream.require(profile_of(symbol), patches.WRAPPERS)[0] == frozenset()
    assert "without an effect" in upstream.require(profile_of(symbol), patches.WRAPPERS)[1][-1]
    module.is_hf_checkpoint = lambda folder: None
    with pytest.raises(ConfigError, match="is_hf_checkpoint"):
        upstream.require(profile_of(row("is_hf_checkpoint", "checkpoint_path")), patches.WRAPPERS)


def test_all_that_is_missing_is_in_one_error_and_nothing_is_patched(module, monkeypatch):
    rows = (
        row("load", "path, cell, optimizer=None", Kind.CALLED),
        row("Trainer.get", "cls, name", Kind.REPLACED),
        row("gone", "path"),
    )
    before = dict(vars(module)), vars(module.Trainer)["get"]
    monkeypatch.setattr(upstream, "profile_for", lambda versions: (profile_of(*rows), ""))
    with pytest.raises(ConfigError) as error:
        installation.install()
    lines = [line for line in str(error.value).splitlines() if "mindformers_of_the_test." in line]
    assert ["load" in lines[0], "gone" in lines[1], len(lines)] == [True, True, 2]
    assert "path, cell, optimizer=None" in lines[0] and "path, network, optimizer=None" in lines[0]
    assert (dict(vars(module)), vars(module.Trainer)["get"]) == before


def test_an_optional_feature_is_disabled(module):
    rows = (row("gone", "", Kind.CALLED, TENSORBOARD), row("load", "path, network", Kind.WRAPPED))
    off, notices = upstream.require(profile_of(*rows))
    # the other: a parameter more, which does no harm
    assert off == {TENSORBOARD} and len(notices) == 2
    assert TENSORBOARD.without in notices[0] and "optimizer=None" in notices[1]


@pytest.fixture
def off():
    yield upstream.switch_off
    upstream.switch_off(())


def test_disabled_features_do_nothing(off, monkeypatch):
    from mindresume.mindformers import adapter, auto_transform
    from mindresume.mindformers.checkpoint_monitor import CheckpointMonitor

    off({upstream.TENSORBOARD, upstream.RESCUE, upstream.TRANSFORM})
    monkeypatch.setattr(
        "mindformers.utils.tensorboard._GLOBAL_TENSORBOARD_WRITER", SimpleNamespace()
    )
    adapter.TensorBoard().handle(SaveWritten(10, 1, 0.1), 0.0)
    assert CheckpointMonitor.emergency_save(None, None) is False
    assert (
        upstream.TRANSFORM.without
        in auto_transform._by_mindspore(None, None, "", 1, None)["refused"]
    )


def test_wrapping_twice_wraps_once_and_keeps_the_kind_of_method(module):
    def make(original):
        @functools.wraps(original)
        def get(*args, **kwargs):
            return "wrapped", original(*args, **kwargs)

        return get

    for _ in range(2):
        installation.replace(row("Trainer.get", "cls, name", Kind.REPLACED), make)
    assert module.Trainer.get("x") == ("wrapped", None) and isinstance(
        vars(module.Trainer)["get"], classmethod
    )


# ---- the wrappers --------------------------------------------------------------------------------

PASSING = sorted(
    set(patches.WRAPPERS)
    - {
        "Trainer.train",
        "Trainer.finetune",
        "Trainer.evaluate",
        "Trainer.predict",
        "Trainer._check_config_rules",
    }
)


def signatures():
    return {symbol.name: symbol.signature for symbol in INSTALLED.symbols if symbol.name in PASSING}


@pytest.mark.parametrize("name", PASSING)
def test_a_wrapper_forwards_unknown_arguments(name, monkeypatch, tmp_path):
    """A later release has one parameter more, and calls by position or by name."""
    monkeypatch.setattr("mindresume.mindformers.adapter.output_root", lambda: str(tmp_path))
    before, seen = training_context.current(), []
    expected = signatures()[name]
    more = f"{expected.removesuffix('**kwargs').rstrip(', ')}, added=None".removeprefix(", ")
    scope = {"seen": seen}
    exec(f"def original({more}): seen.append(added)", scope)  # noqa: S102
    wrapper = patches.WRAPPERS[name](scope["original"])
    runner = types.SimpleNamespace(
        sink_mode=False, sink_size=1, global_batch_size=1, epochs=1, initial_epoch=0
    )
    config = types.SimpleNamespace(
        only_save_strategy=False, data_size=1, get=lambda *_: None, runner_config=runner
    )
    values = {
        "config": config,
        "checkpoint_path": str(tmp_path),
        "common_filename": str(tmp_path / "common.json"),
        "path": str(tmp_path),
        "dataset": types.SimpleNamespace(set_init_step=None),
        "load_checkpoint": None,
    }
    required = [
        part
        for part in (expected.split(", ") if expected else ())
        if "=" not in part and "*" not in part
    ]
    training_context.set_current(training_context.TrainingContext())
    try:
        wrapper(*(values.get(part, part) for part in required), added="new")
        wrapper(
            **{part: values.get(part, part) for part in required if part not in ("self", "cls")},
            added="newer",
            **{part: part for part in required if part in ("self", "cls")},
        )
    finally:
        training_context.set_current(before)
    assert seen == ["new", "newer"]


# ---- packages that cannot be imported ------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """broken(source, package): a module named mindformers_broken with this source, and an empty
    ``package`` if it is not ""."""

    def make(source: str, package: str = "") -> str:
        (tmp_path / "mindformers_broken.py").write_text(source)
        if package:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        return "mindformers_broken"

    monkeypatch.setattr(
        upstream.metadata,
        "requires",
        lambda name: ["hyper-absent~=1.0.0", 'other; extra == "test"'],
    )
    return make


@pytest.mark.parametrize(
    "source, package, words",
    [
        (
            "import hyper_absent",
            "",
            ["No module named 'hyper_absent'", "Install hyper-absent~=1.0.0, which it requires"],
        ),
        (
            "from hyper_absent import DTensor",
            "hyper_absent",
            ["cannot import name 'DTensor'", "hyper-absent~=1.0.0", "incomplete"],
        ),
        (
            "import hyper_absent.core",
            "hyper_absent",
            ["No module named 'hyper_absent.core'", "hyper-absent~=1.0.0", "incomplete"],
        ),
        ("import unheard_of", "", ["No module named 'unheard_of'", "Install mindformers again"]),
        ("context.__all__", "", ["NameError", "Install mindformers again"]),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(broken, source, package, words):
    with pytest.raises(ConfigError) as caught:
        upstream.require_import(broken(source, package))
    assert [word for word in words if word not in str(caught.value)] == [] and "\n" not in str(
        caught.value
    )
    assert "mindformers " + upstream.metadata.version("mindformers") in str(caught.value)


def test_an_environment_without_mindformers_is_named(monkeypatch):
    def version(name):
        raise upstream.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(upstream.metadata, "version", version)
    with pytest.raises(ConfigError, match="mindformers is not installed"):
        upstream.installed_versions()

"""mindformers/kept_graphs.py: when MindSpore may read the graph of an earlier start."""

import os
import sys
from types import ModuleType

import pytest
from rank_folders import Threads

from mindresume.coordination.collectives import SingleProcess
from mindresume.mindformers import kept_graphs
from mindresume.mindformers.kept_graphs import ENABLE, FOLDER, PATH, keep_graph

CONFIG = {"model": {"layers": 2}, "seed": 0}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Leaves out modules that other tests have written and imported."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.endswith(".py") and (
            not os.path.exists(path) or os.stat(path).st_ctime > kept_graphs._BEGAN
        ):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(config, files): returns whether MindSpore may read the graph of an earlier start; then
    it writes ``files`` and finishes a step."""

    def start(config=CONFIG, files={"graph": b"nodes"}, steps=1):  # noqa: B006
        for name in (ENABLE, PATH):
            monkeypatch.delenv(name, raising=False)
        said = []
        graph = keep_graph(config, str(tmp_path), SingleProcess(), said.append)
        assert os.environ[ENABLE] == "1" and os.environ[PATH] == str(graph.path)
        found = {path.name: path.read_bytes() for path in graph.path.iterdir()}
        assert bool(found) == (" is used" in said[0].line())
        for name, content in files.items():
            (graph.path / name).write_bytes(content)
        for _ in range(steps):
            graph.seal()
        return bool(found)

    return start


def test_the_same_configuration_release_and_source_reads_what_was_compiled(start):
    assert [start(), start(), start()] == [False, True, True]


def test_another_configuration_compiles(start):
    start()
    assert not start({**CONFIG, "model": {"layers": 3}})
    assert start()


@pytest.mark.parametrize("name, compiles", [("MS_DEV_X", True), ("MS_SCHED_PORT", False)])
def test_settings_of_mindspore_count_and_the_place_in_the_cluster_does_not(
    start, monkeypatch, name, compiles
):
    start()
    monkeypatch.setenv(name, "1")
    assert start() is not compiles


def test_another_release_of_cann_behind_the_same_link_compiles(start, monkeypatch, tmp_path):
    for release in ("8.1", "8.2"):
        (tmp_path / release).mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "latest"))
    (tmp_path / "latest").symlink_to("8.1")
    start()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("8.2")
    assert not start()


def test_a_changed_source_of_the_user_compiles(start, monkeypatch, tmp_path):
    monkeypatch.setattr(kept_graphs, "_BEGAN", 1e12)
    module = ModuleType("network_of_the_user")
    module.__file__ = str(tmp_path / "network.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "network.py").write_text("a = 1")
    start()
    assert start()
    (tmp_path / "network.py").write_text("a = 2")
    assert not start()


def test_a_source_that_changed_since_the_process_began_keeps_nothing(monkeypatch, tmp_path):
    """A rank that was forked runs what its standby process has imported."""
    for name in (ENABLE, PATH):
        monkeypatch.delenv(name, raising=False)
    module = ModuleType("network_of_the_user")
    module.__file__ = str(tmp_path / "network.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "network.py").write_text("a = 1")
    monkeypatch.setattr(kept_graphs, "_BEGAN", os.stat(module.__file__).st_ctime - 1)
    said = []
    assert keep_graph(CONFIG, str(tmp_path), SingleProcess(), said.append) is None
    assert "network.py has changed" in said[0].line() and ENABLE not in os.environ


def test_another_release_compiles(start, monkeypatch):
    start()
    monkeypatch.setattr(kept_graphs.upstream, "installed_versions", lambda: {"mindspore": "9.9"})
    assert not start()


def test_a_start_that_dies_before_its_first_step_leaves_nothing_to_the_next(start):
    """Its graph may be torn, or what killed it."""
    start()
    assert start(steps=0)
    assert not start()


@pytest.mark.parametrize("name, content", [("graph", b"n\0\0\0\0"), ("graph_1", b"torn")])
def test_files_that_changed_after_the_first_step_are_not_read(start, tmp_path, name, content):
    """The host has crashed, or the process was compiling another graph when it was killed."""
    start()
    (graph,) = (tmp_path / FOLDER / "rank_0").iterdir()
    (graph / name).write_bytes(content)
    assert not start()


@pytest.mark.parametrize(
    "content", [b"attention_dropout-Dropout", b"Seed0", b"StandardNormal seed"]
)
def test_a_graph_that_draws_random_numbers_is_not_kept(start, content):
    start(files={"graph": content})
    assert not start()


def test_the_last_two_graphs_are_kept(start, tmp_path):
    for layers in (1, 2, 3):
        start({"layers": layers})
        for number, path in enumerate(sorted((tmp_path / FOLDER / "rank_0").iterdir())):
            os.utime(path, (number, number))
    assert len(list((tmp_path / FOLDER / "rank_0").iterdir())) == 2


@pytest.mark.parametrize("variable, config", [(ENABLE, {}), (PATH, {}), ("X", {"do_eval": True})])
def test_what_the_user_has_set_stays_and_an_evaluation_keeps_nothing(
    monkeypatch, tmp_path, variable, config
):
    for name in (ENABLE, PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "0")
    before = dict(os.environ)
    assert keep_graph({**CONFIG, **config}, str(tmp_path), SingleProcess(), print) is None
    assert dict(os.environ) == before and not (tmp_path / FOLDER).exists()


def test_if_one_rank_has_no_graph_all_compile(tmp_path, monkeypatch):
    """Ranks that compile create groups of communication together."""
    monkeypatch.setattr(os, "environ", {})

    def work(group):
        os.environ.clear()
        graph = keep_graph(CONFIG, str(tmp_path), group, lambda event: None)
        had = any(graph.path.iterdir())
        group.gather(b"")
        (graph.path / "graph").write_bytes(b"nodes")
        return graph, had

    first = Threads(2).run(work)
    for graph, _ in first:
        graph.seal()
    second = Threads(2).run(work)
    assert [had for _, had in second] == [True, True]
    second[0][0].seal()
    assert [had for _, had in Threads(2).run(work)] == [False, False]


def test_a_disk_that_is_full_is_a_warning_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / FOLDER).write_text("no folder")
    said = []
    assert keep_graph(CONFIG, str(tmp_path), SingleProcess(), said.append) is None
    assert "the compiled graph is not kept" in said[0].line() and os.environ == {}

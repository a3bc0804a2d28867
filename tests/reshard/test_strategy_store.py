"""Strategies of earlier jobs, beside which the next job writes its own."""

import os
from dataclasses import replace

import pytest
from rank_folders import STORAGE, dir_at
from reshard.plans import MODEL, Plan, foreign, random_tensors, recorded

from mindresume.errors import StrategyError
from mindresume.formats.strategy import read_strategy
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.strategy_store import (
    MARK,
    StrategyLookup,
    identity_of,
    set_aside,
    strategy_for,
)
from tests.strategy_files import write_strategy

TENSORS = random_tensors(MODEL)
OLD, NEW = Plan.parse("dp2tp2", MODEL), Plan.parse("tp2", MODEL)


@pytest.fixture
def job(tmp_path):
    """Returns the output of mindformers: (checkpoint, its candidate, strategy folder)."""
    candidate = foreign(tmp_path / "checkpoint", OLD, TENSORS)
    write_strategy(OLD.strategy(), str(tmp_path / "strategy"))
    return str(tmp_path / "checkpoint"), candidate, str(tmp_path / "strategy")


def content(folder):
    return {name: STORAGE.open(os.path.join(folder, name)).read() for name in os.listdir(folder)}


def test_the_folder_beside_is_found_and_an_explicit_one_wins(job, tmp_path):
    root, candidate, _ = job
    write_strategy(NEW.strategy(), str(tmp_path / "other"))
    assert strategy_for(dir_at(root), candidate, None) == OLD.strategy()
    assert strategy_for(dir_at(root), candidate, f"{tmp_path}/other/") == NEW.strategy()
    with pytest.raises(StrategyError, match="nowhere: there is no such strategy"):
        strategy_for(dir_at(root), candidate, str(tmp_path / "nowhere"))


def test_none_is_needed_for_records_and_for_one_rank(job, tmp_path):
    write_strategy(OLD.strategy(), str(tmp_path / "ours" / "strategy"))
    assert (
        strategy_for(
            dir_at(tmp_path / "ours" / "checkpoint"),
            recorded(tmp_path / "ours" / "checkpoint", OLD, TENSORS),
            None,
        )
        is None
    )
    one = foreign(tmp_path / "one" / "checkpoint", Plan.parse("dp1", MODEL), TENSORS)
    assert strategy_for(dir_at(tmp_path / "one" / "checkpoint"), one, None) is None
    # mindformers makes it for every training
    (tmp_path / "one" / "strategy").mkdir()
    assert strategy_for(dir_at(tmp_path / "one" / "checkpoint"), one, None) is None


def test_set_aside_keeps_everything_and_the_same_start_finds_it(job):
    root, candidate, folder = job
    before, identity = content(folder), identity_of(dir_at(root), candidate)
    kept = set_aside(STORAGE, folder, strategy_for(dir_at(root), candidate, None), identity)
    assert os.listdir(folder) == [] and kept.startswith(f"{folder}_")
    assert {name: data for name, data in content(kept).items() if name != MARK} == before
    # the next job is compiled, and killed
    write_strategy(NEW.strategy(), folder)
    for given in (None, folder, f"{folder}/"):
        assert strategy_for(dir_at(root), candidate, given) == OLD.strategy()
    another = replace(candidate, files={0: candidate.files[0]})
    assert strategy_for(dir_at(root), another, None) == NEW.strategy()
    assert open_checkpoint(STORAGE, root).weights.tensors.keys() >= TENSORS.keys()
    # of the second start: that of the new job is not it
    again = strategy_for(dir_at(root), candidate, None)
    other = set_aside(STORAGE, folder, again, identity)
    assert other != kept and os.listdir(folder) == [] and MARK not in os.listdir(other)
    assert strategy_for(dir_at(root), candidate, None) == OLD.strategy()


def test_a_damaged_mark_is_no_mark(job):
    root, candidate, folder = job
    kept = set_aside(STORAGE, folder, read_strategy(folder), identity_of(dir_at(root), candidate))
    write_strategy(NEW.strategy(), folder)
    assert strategy_for(dir_at(root), candidate, None) == OLD.strategy()
    for text in ("", "{", '{"a": 1}', "7"):
        with open(os.path.join(kept, MARK), "w") as file:
            file.write(text)
        assert strategy_for(dir_at(root), candidate, None) == NEW.strategy()


def test_the_number_of_ranks_that_saved_it(job, tmp_path):
    root, candidate, folder = job
    assert StrategyLookup(STORAGE)(root, candidate).world_size == 4
    set_aside(
        STORAGE,
        folder,
        strategy_for(dir_at(root), candidate, None),
        identity_of(dir_at(root), candidate),
    )
    write_strategy(NEW.strategy(), folder)
    assert StrategyLookup(STORAGE)(root, candidate).world_size == 4
    assert StrategyLookup(STORAGE, folder)(root, candidate).world_size == 4
    assert StrategyLookup(STORAGE, str(tmp_path / "nowhere"))(root, candidate) is None

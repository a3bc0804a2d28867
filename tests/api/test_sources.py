"""How a caller names a checkpoint, and what is a strategy."""

import numpy as np
import pytest
from rank_folders import STORAGE, leases, save
from reshard.plans import MODEL, Plan, complete, put, random_tensors

import mindresume
from mindresume.api.sources import is_strategy, opened
from mindresume.errors import ConfigError


def test_strategy_arguments_are_recognized(tmp_path):
    for fmt in ("ckpt", "json"):
        Plan.parse("tp2").write(tmp_path / fmt, fmt)
        assert is_strategy(STORAGE, str(tmp_path / fmt))
        assert all(is_strategy(STORAGE, str(path)) for path in (tmp_path / fmt).iterdir())
    put(tmp_path / "weights" / "strategy.ckpt", {"w": np.zeros(3, np.float32)})
    complete(tmp_path / "merged", random_tensors(MODEL))
    (tmp_path / "merged" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run" / "checkpoint", 5, world=1)
    (tmp_path / "failed_strategy.ckpt").write_bytes(b"")
    assert is_strategy(STORAGE, str(tmp_path / "failed_strategy.ckpt"))
    for path in ("weights", "weights/strategy.ckpt", "merged", "empty", "run", "run/checkpoint"):
        assert not is_strategy(STORAGE, str(tmp_path / path)), path


def test_a_path_is_locked_until_the_end_of_the_block(tmp_path):
    save(tmp_path, 5, world=1)
    with opened(str(tmp_path)) as source:
        assert source.state.step == 5 and len(leases(tmp_path)) == 1
    with opened(str(tmp_path), hold=False):
        assert leases(tmp_path) == []


def test_a_checkpoint_stays_locked_as_long_as_its_owner_wants(tmp_path):
    save(tmp_path, 5, world=1)
    checkpoint = mindresume.open(tmp_path)[5]
    with opened(checkpoint) as source:
        assert source.state.step == 5 and checkpoint.is_held
    assert checkpoint.is_held
    checkpoint.release()
    assert leases(tmp_path) == []
    with pytest.raises(ConfigError), opened(checkpoint, step=5):
        pass

"""Mutation test: the tests of the tier find each rule that is broken in its source."""
import sys
import types
from pathlib import Path

import pytest
from saving.memory_tier import test_tier as tests

from mindresume.saving.memory_tier import tier

MUTANTS = {
    "the record stays while the files are overwritten": (
        "            storage.remove(os.path.join(target.attempt(step), record_name(target.rank)))\n", "",
        lambda memory: tests.test_death_before_each_operation_leaves_a_whole_save(memory, 2, 8, False)),
    "the record precedes the files": (
        "            for mapped, path in zip(slot.files, paths, strict=True):\n", "            for mapped, path in ():\n",
        lambda memory: tests.test_the_newest_saves_are_whole_and_their_files_are_used_again(
            memory, 2, [6, 4], "safetensors", False)),
    "the newest save is overwritten": (
        "        oldest = step_to_overwrite(held, self._count, self.is_whole)\n",
        "        oldest = held[0] if len(held) == self._count else None\n",
        lambda memory: tests.test_death_before_each_operation_leaves_a_whole_save(memory, 2, 8, False)),
    "the loaded save is removed before a newer one is common": (
        "        if common_step(held, self._count, self.is_whole) is not None:\n", "        if True:\n",
        lambda memory: tests.test_the_loaded_save_stays_until_a_newer_one_is_common(memory)),
    "a reader is overwritten": (
        "            is_read = attempt_name(step, target.run) in self._read_locks()\n", "            is_read = False\n",
        lambda memory: tests.test_a_save_that_is_being_read_is_not_written_into(memory)),
    "the checksums are of what was there before": (
        "            _copy(plan, file.tensors, mapped.data)\n", "            pass\n",
        lambda memory: tests.test_the_newest_saves_are_whole_and_their_files_are_used_again(
            memory, 2, [6, 4], "safetensors", False)),
    "a step ends while the checksums of an earlier one are computed": (
        "        self._join(self._work)                      # see slots.py", "        pass                      # see slots.py",
        lambda memory: tests.test_a_step_ends_only_when_earlier_background_work_is_done(memory)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(memory, monkeypatch, name):
    old, new, test = MUTANTS[name]
    source = Path(tier.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    module = types.ModuleType("mutant_of_the_tier")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source.replace(old, new), name, "exec"), module.__dict__)
    monkeypatch.setattr(tests, "MemoryTier", module.MemoryTier)
    with pytest.raises((AssertionError, OSError)):
        test(memory)

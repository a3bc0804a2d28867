"""Mutation test: the tests of the tier find each rule that is broken in its source."""

import inspect
import sys
import textwrap

import pytest
from saving.memory_tier import test_tier as tests

from mindresume.saving.memory_tier.slots import TierSlots
from mindresume.saving.memory_tier.tier import MemoryTier


def dies(memory, patch):
    tests.test_death_before_each_operation_leaves_a_whole_save(memory, patch, 2, 8, False)


def saves(memory, patch):
    tests.test_the_newest_saves_are_whole_and_their_files_are_used_again(
        memory, 2, [6, 4], "safetensors", False
    )


MUTANTS = {  # what: (class, method, its source, the wrong source, the test that finds it)
    "the record stays while the files are overwritten": (
        TierSlots,
        "_vacate",
        "storage.remove(os.path.join(target.attempt(step), record_name(target.rank)))",
        "pass",
        dies,
    ),
    "the record precedes the files": (
        TierSlots,
        "record",
        "for mapped, path in zip(slot.files, paths, strict=True):",
        "for mapped, path in ():",
        saves,
    ),
    "the loaded save is removed before a newer one is common": (
        MemoryTier,
        "_save",
        "if common_step(held, slots.count, whole) is not None:",
        "if True:",
        lambda memory, patch: tests.test_the_loaded_save_stays_until_a_newer_one_is_common(memory),
    ),
    "a reader is overwritten": (
        TierSlots,
        "_vacate",
        "is_read = attempt_name(step, target.run) in self._read_locks()",
        "is_read = False",
        lambda memory, patch: tests.test_a_save_that_is_being_read_is_not_written_into(memory),
    ),
    "the checksums are of what was there before": (
        TierSlots,
        "copy",
        "memory[position : position + len(piece)] = piece",
        "pass",
        saves,
    ),
    "a step ends while the checksums of an earlier one are computed": (
        MemoryTier,
        "step_end",
        "self._join(self._work)",
        "pass",
        lambda memory, patch: tests.test_a_step_ends_only_when_earlier_background_work_is_done(
            memory
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(memory, monkeypatch, name):
    owner, method, old, new, test = MUTANTS[name]
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(old) == 1
    made = dict(vars(sys.modules[owner.__module__]))
    exec(compile(source.replace(old, new), name, "exec"), made)
    monkeypatch.setattr(owner, method, made[method])
    with pytest.raises((AssertionError, OSError)):
        test(memory, monkeypatch)

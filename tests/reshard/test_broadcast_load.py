"""Balanced load: the plan is the same on all ranks, every byte is read once a replica group, and
what arrives is what was there."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_folders import Ranks

from mindresume.model.layout import TensorLayout, held, shape_of, whole
from mindresume.reshard import region_load
from mindresume.reshard.region_load import exchange_slices, plan_reads
from sim.threads import Condition

LAYOUTS = {
    "rows": (TensorLayout((2, 2), (0, -1)), (8, 6)),
    "columns": (TensorLayout((2, 2), (-1, 0)), (8, 6)),
    "sharded": (TensorLayout((2, 2), (0, -1), 2), (8, 6)),
    "copied": (TensorLayout((2, 2), (-1,)), (5,)),
    "empty": (TensorLayout((2, 2), (-1, 0)), (0, 4)),
}
DTYPES = {
    "rows": "float32",
    "columns": "bfloat16",
    "sharded": "float32",
    "copied": "float16",
    "empty": "float32",
    "global_step": "int32",
}
SIZES = {"rows": 4, "columns": 2, "sharded": 4, "copied": 2, "empty": 4, "global_step": 4}


def regions_of(rank: int, layouts=LAYOUTS):
    return {
        **{
            name: held(layout, rank % layout.stage_size, shape)
            for name, (layout, shape) in layouts.items()
        },
        "global_step": whole((1,)),
    }


class Cable:
    """Connects all ranks. Checks that the ranks of a group make the same calls, and that only the
    owner has the bytes."""

    def __init__(self):
        self.condition, self.calls, self.said = Condition(), {}, []

    def broadcast(self, rank):
        counts = {}

        def call(ranks, owner, data, count):
            assert rank in ranks and owner in ranks and (data is not None) == (rank == owner)
            assert 0 < count <= region_load.MAX_EXCHANGE_BYTES and (
                data is None or len(data) == count
            )
            number = counts[ranks] = counts.get(ranks, 0) + 1
            with self.condition:
                calls = self.calls.setdefault((ranks, number), {})
                calls[rank] = (owner, count, data)
                self.condition.notify_all()
                assert self.condition.wait_for(lambda: len(calls) == len(ranks), 10), (
                    f"{ranks} hang"
                )
                assert len({(owner, count) for owner, count, _ in calls.values()}) == 1
                return calls[owner][2]

        return call


def load(ranks, layouts, tensors, dtypes, sizes):
    """{rank: arrays}, {rank: names it read}."""
    cable, results, read = Cable(), {}, {}

    def work(rank):
        regions = regions_of(rank, layouts)
        mine, exchanges = plan_reads(regions, layouts, sizes, rank)
        read[rank] = set(mine)
        arrays = {
            name: np.ascontiguousarray(tensors[name][tuple(slice(*part) for part in region)])
            for name, region in mine.items()
        }
        exchange_slices(arrays, exchanges, regions, dtypes, rank, cable.broadcast(rank))
        results[rank] = arrays

    assert Ranks(ranks).run(lambda group: work(group.rank)) == [None] * ranks
    return results, read


def tensors_for(layouts, dtypes):
    random = np.random.default_rng(3)
    made = {
        name: random.standard_normal(shape).astype(
            ml_dtypes.bfloat16 if dtypes[name] == "bfloat16" else dtypes[name]
        )
        for name, (_, shape) in layouts.items()
    }
    return {**made, "global_step": np.array([7], np.int32)}


@pytest.mark.parametrize("most", [1, 10, 64, 64 << 20])
def test_every_rank_gets_its_part_and_each_piece_is_read_once(monkeypatch, most):
    monkeypatch.setattr(region_load, "MAX_EXCHANGE_BYTES", most)
    tensors = tensors_for(LAYOUTS, DTYPES)
    tensors["rows"][0, 0], tensors["rows"][1, 1] = -0.0, np.nan
    found, read = load(4, LAYOUTS, tensors, DTYPES, SIZES)
    for rank, arrays in found.items():
        regions = regions_of(rank)
        assert set(arrays) == set(regions)
        for name, region in regions.items():
            expected = tensors[name][tuple(slice(*part) for part in region)]
            assert (arrays[name].shape, arrays[name].dtype.name) == (shape_of(region), DTYPES[name])
            assert arrays[name].tobytes() == expected.tobytes()
    for name in LAYOUTS:
        pieces = [regions_of(rank)[name] for rank in range(4) if name in read[rank]]
        if name == "empty":
            continue
        assert (
            len(pieces) == len(set(pieces)) == len({regions_of(rank)[name] for rank in range(4)})
        ), name


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(0, 40))
@settings(max_examples=25)
def test_any_stage_of_any_job(stages, dp, tp, count):
    layout = {
        number: (
            TensorLayout((dp, tp), (0, -1) if number % 3 else (-1, -1)),
            (tp * (1 + number), 3),
        )
        for number in range(count)
    }
    layouts = {f"w{number}": row for number, row in layout.items()}
    dtypes = {name: "float32" for name in layouts} | {"global_step": "int32"}
    tensors = tensors_for(layouts, dtypes)
    found, read = load(stages * dp * tp, layouts, tensors, dtypes, dict.fromkeys(dtypes, 4))
    for rank, arrays in found.items():
        for name, region in regions_of(rank, layouts).items():
            assert (
                arrays[name].tobytes()
                == tensors[name][tuple(slice(*part) for part in region)].tobytes()
            )
    loads = [
        sum(np.prod(shape_of(regions_of(rank, layouts)[name])) for name in names)
        for rank, names in read.items()
    ]
    if count > 20 and dp > 1:
        assert max(loads) < 1.35 * sum(loads) / len(loads)


def test_nothing_is_broadcast_if_no_slices_are_equal():
    layouts = {"w": (TensorLayout((4,), (0,)), (8,))}
    regions = {"w": held(layouts["w"][0], 1, (8,)), "global_step": whole((1,))}
    assert plan_reads(regions, layouts, {"w": 4, "global_step": 4}, 1) == (regions, [])


@pytest.mark.parametrize("saved, mine", [((1,), ()), ((), (1,)), ((1, 1), (1,))])
def test_a_counter_of_other_dimensions_is_read_by_each_rank(saved, mine):
    """One element, () in the network and (1,) in the checkpoint: its layout does not describe the
    region that is read."""
    layouts = {
        "scale": (TensorLayout((2, 2), (-1,) * len(mine)), mine),
        "copied": (TensorLayout((2, 2), (-1,)), (5,)),
    }
    plans = [
        plan_reads(
            {"scale": whole(saved), "copied": whole((5,))}, layouts, {"scale": 4, "copied": 2}, rank
        )
        for rank in range(4)
    ]
    assert all("scale" in regions for regions, _ in plans)
    assert sum("copied" in regions for regions, _ in plans) == 1
    assert {tuple(exchanges) for _, exchanges in plans} == {tuple(plans[0][1])}

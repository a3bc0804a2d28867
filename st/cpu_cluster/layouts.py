"""Completes what the front end forgets because of the emulated AllGather: the layout of
optimizer-sharded weights.

What: where a weight X is missing from a strategy file or from the strategy metadata although its
moment ``adam_m.X`` is there, the layout of ``adam_m.X`` is copied to X. Why: the front end finds
the layout of a weight by walking from the operator that uses it back through the AllGather of
optimizer parallelism, and does not walk through the primitive that stands for it here
(``collectives``). With a real AllGather a weight always has the layout of its moments. The dtype is
copied too, which is right for float32 weights only. Nothing is done in jobs without an emulated
AllGather. No checkpoint code is touched.
"""

import os
from collections.abc import Callable

from . import capabilities

MOMENT = "adam_m."


def complete_names(table: dict[str, object]) -> None:
    """Adds X to ``table`` for every ``adam_m.X`` without X."""
    for name in [n for n in table if n.startswith(MOMENT)]:
        table.setdefault(name[len(MOMENT) :], table[name])


def complete_strategy_file(path: str) -> list[str]:
    """Rewrites one strategy file (protobuf), atomically. Returns the names added."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    strategies = ParallelStrategyMap()
    with open(path, "rb") as f:
        strategies.ParseFromString(f.read())
    items = {item.param_name: item for item in strategies.parallel_layout_item}
    added = [
        n[len(MOMENT) :] for n in items if n.startswith(MOMENT) and n[len(MOMENT) :] not in items
    ]
    for weight in added:
        item = strategies.parallel_layout_item.add()
        item.CopyFrom(items[MOMENT + weight])
        item.param_name = weight
    if added:
        with open(path + ".part", "wb") as f:
            f.write(strategies.SerializeToString())
        os.replace(path + ".part", path)
    return added


def _strategy_file():
    from mindspore import get_auto_parallel_context

    for key in ("strategy_ckpt_save_file", "strategy_ckpt_config"):
        try:
            value = get_auto_parallel_context(key)
        except ValueError:
            continue
        value = value.get("save_file") if isinstance(value, dict) else value
        if value and os.path.exists(value):
            return value
    return None


def install(is_needed: Callable[[], bool]) -> None:
    """``is_needed()``: whether an AllGather was emulated in this process."""
    executor = capabilities.executors()._CellGraphExecutor
    compile_graph = executor.compile

    def compile_and_complete(self, *args, **kwargs):
        result = compile_graph(self, *args, **kwargs)
        if is_needed():
            path = _strategy_file()
            if path:
                complete_strategy_file(path)
        return result

    executor.compile = compile_and_complete

    try:
        from mindspore.parallel.strategy import _NetStrategyInfo
    except ImportError:
        return
    for name in ("get_rank_layout", "get_local_rank_layout"):
        setattr(_NetStrategyInfo, name, _completed(getattr(_NetStrategyInfo, name), is_needed))


def _completed(get_layouts, is_needed):
    def get_completed_layouts(self, *args, **kwargs):
        ranks = get_layouts(self, *args, **kwargs)
        if ranks and is_needed():
            for table in ranks.values():
                complete_names(table)
        return ranks

    return get_completed_layouts

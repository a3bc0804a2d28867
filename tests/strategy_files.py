"""Strategy files as MindSpore leaves them after a compile: one a rank, or one for all; protobuf or
JSON."""

import json
import os

from mindresume.formats import strategy as codec


def encode_strategy(stages, fmt="ckpt"):
    """Returns the bytes of the file of one stage, or of a merged file for several. ``stages``:
    {stage: {parameter: layout}}."""
    if fmt == "ckpt":
        return codec.encode_strategy(stages)
    rows = {
        f"{stage}-{name}" if len(stages) > 1 else name: layout.normalized()
        for stage, layouts in stages.items()
        for name, layout in layouts.items()
    }
    operators = {
        f"operator_{stage}": {"stage": stage, "parallel_strategy": [[1]]} for stage in stages
    }
    items = {
        name: {
            "dev_matrix": layout.device_matrix,
            "tensor_map": layout.tensor_map,
            "param_split_shape": [],
            "indices_offset": [],
            "field": 0,
            "opt_weight_shard_step": layout.optimizer_stride,
            "opt_weight_shard_size": layout.optimizer_shards,
        }
        for name, layout in rows.items()
    }
    return json.dumps(
        {"current_stage": 1, "parallel_strategy_item": operators, "parallel_layout_item": items}
    ).encode()


def write_strategy(strategy, folder, fmt="ckpt"):
    """Writes the files of all ranks; returns their paths in order of rank."""
    contents = [
        encode_strategy({number: stage}, fmt) for number, stage in enumerate(strategy.stages)
    ]
    os.makedirs(folder, exist_ok=True)
    paths = [
        os.path.join(folder, f"ckpt_strategy_rank_{rank}.{fmt}")
        for rank in range(strategy.world_size)
    ]
    for rank, path in enumerate(paths):
        with open(path, "wb") as file:
            file.write(contents[rank // strategy.stage_size])
    return paths

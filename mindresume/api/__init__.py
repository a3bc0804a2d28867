"""The Python API: ``import mindresume`` gives its names, and imports a module of this room when the first of them is used.

    catalog.py      open() and Catalog: which checkpoints a folder holds, which one a resume would take, whether bytes are intact
    checkpoint.py   Checkpoint: the state and the tensors of one saved step, held while they are read
    tensors.py      TensorInfo, TensorSlice: shapes, layouts, which rank stores what
    inspection.py   inspect(): all of that for a checkpoint or a strategy
    conversion.py   convert(), merge(), export_hf()
    comparison.py   compare()
    pruning.py      prune()
    results.py      what the calls return: frozen values with to_json()
    sources.py      how a caller names a checkpoint: a path, or a Checkpoint
    progress.py     Progress: how long work reports its progress

The command line calls these functions and prints what they return; its ``--json`` is ``to_json()`` of the result.
"""

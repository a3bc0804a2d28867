"""Implements the Python API. ``import mindresume`` offers its names, and imports a module of this
package at the first use of one.

    catalog.py      open() and Catalog: the checkpoints of a folder, which one a resume would take,
                    whether bytes are intact
    checkpoint.py   Checkpoint: the state and the tensors of one saved step, held while they are
                    read; TensorInfo, TensorSlice: shapes, layouts, which rank stores what
    inspection.py   inspect(): the tensors and slices of a checkpoint or a strategy; compare()
    conversion.py   convert(), merge(), export_hf()
    publication.py  published(): the newest weights that a training publishes; publishes them
    maintenance.py  prune(), scrub(), flush()
    doctor.py       examine(): what is installed, what mindresume will do, where saves go
    results.py      the results of the calls: frozen values with to_json()

The command line calls these functions and prints their results; its ``--json`` is ``to_json()`` of
the result.
"""

"""run_mindformer.py whose data set is batched by two processes. For st/test_supervisor.py.

data_worker_4711         in the working directory, once for each of these processes
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def note_worker(*columns):
    """Returns a batch as it is. The last argument is no column."""
    Path(f"data_worker_{os.getpid()}").touch()
    return columns[:-1]


def main() -> None:
    from mindspore.dataset.engine.datasets import Dataset

    batch = Dataset.batch

    def in_processes(self, *args, **named):
        return batch(
            self,
            *args,
            **{
                **named,
                "per_batch_map": note_worker,
                "python_multiprocessing": True,
                "num_parallel_workers": 2,
            },
        )

    Dataset.batch = in_processes
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())

"""run_mindformer.py whose computation raises an error in one step. For st/test_memory_tier.py.

FAIL_IN_STEP=20              the 20th computation of this process fails
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

FAIL = "FAIL_IN_STEP"


def main() -> None:
    from mindspore.graph.api import _CellGraphExecutor

    compute, fatal, done = _CellGraphExecutor.__call__, int(os.environ.get(FAIL, "0")), []

    def fail_or_compute(self, *args, **kwargs):
        done.append(None)
        if len(done) == fatal:
            raise RuntimeError(f"{FAIL}={fatal}")
        return compute(self, *args, **kwargs)

    _CellGraphExecutor.__call__ = fail_or_compute
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())

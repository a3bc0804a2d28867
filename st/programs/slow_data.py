"""run_mindformer.py with a rank whose data comes late. For st/test_slow_rank.py.

SLOW_RANK=2                      the rank; absent: none
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    from mindspore.train.dataset_helper import DatasetHelper

    every = DatasetHelper.__iter__

    def late(self):
        for element in every(self):
            if os.environ.get("SLOW_RANK") == os.environ.get("RANK_ID"):
                time.sleep(0.5)
            yield element

    DatasetHelper.__iter__ = late
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()

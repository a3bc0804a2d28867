"""The command line of mindresume, in which one process of a launch is killed before its first file
is finished. For st/test_shared_conversions.py.

    KILLED_PROCESS=1 msrun ... killed_conversion.py convert SRC DST
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    from mindresume import cli
    from mindresume.reshard.direct_engine import Engine

    write = Engine.write

    def die_before_they_are_marked(self, *arguments):
        found = write(self, *arguments)
        if os.environ["KILLED_PROCESS"] == os.environ["RANK_ID"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Engine.write = die_before_they_are_marked
    cli.main()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()

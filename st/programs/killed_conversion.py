"""The command line of mindresume, in which one process of a launch is killed after its first file. For
st/test_shared_conversions.py.

    KILLED_PROCESS=1 msrun ... killed_conversion.py convert SRC DST
"""
from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    from mindresume import cli
    from mindresume.reshard.converter import Conversion
    write = Conversion.write

    def die_after_the_first(self, writer, numbers=None):
        if os.environ["KILLED_PROCESS"] == os.environ["RANK_ID"]:
            write(self, writer, list(numbers)[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, writer, numbers)
    Conversion.write = die_after_the_first
    cli.main()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()

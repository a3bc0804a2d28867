"""run_mindformer.py that kills itself whenever its network was loaded with the weights of one step.
For st/test_recovery.py.

CRASH_AFTER_LOAD=15          dies right after loading step 15
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

CRASH = "CRASH_AFTER_LOAD"


def main() -> None:
    """Trains; the first step after that of the environment compiles the network, and its first
    computation kills the process."""
    import mindspore as ms
    from mindspore.graph.api import _CellGraphExecutor

    train, compute, fatal, armed = (
        ms.Model._train,
        _CellGraphExecutor.__call__,
        int(os.environ[CRASH]),
        [],
    )

    def arm_and_train(self, *args, **kwargs):
        counters = {parameter.name: parameter for parameter in self._train_network.get_parameters()}
        armed.append(int(counters["global_step"].asnumpy().reshape(-1)[0]) == fatal)
        return train(self, *args, **kwargs)

    def die_or_compute(self, *args, **kwargs):
        if armed and armed[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, *args, **kwargs)

    ms.Model._train, _CellGraphExecutor.__call__ = arm_and_train, die_or_compute
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())

"""run_mindformer.py whose ranks wait after a step as long as the file ``hold_STEP`` is in the
working folder. For st/test_standby.py."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    from mindspore.train.callback._callback import CallbackManager

    from st.cpu_cluster.recorder import global_step

    end = CallbackManager.on_train_step_end

    def hold(self, run_context):
        end(self, run_context)
        step = global_step(run_context.original_args())
        while Path(f"hold_{step}").exists():
            time.sleep(0.02)

    CallbackManager.on_train_step_end = hold
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())

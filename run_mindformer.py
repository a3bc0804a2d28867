"""Runs MindSpore Transformers with mindresume: ``python run_mindformer.py --help``.

It takes the command line of the script of the same name in MindSpore Transformers. It imports
mindformers only after the arguments are checked.
"""

from __future__ import annotations

import os
import sys
import traceback

from mindresume.errors import (
    AlteredWeightsError,
    ConfigError,
    MindResumeError,
    ResumeDifferenceError,
    TrainingCompleteError,
)
from mindresume.launch.arguments import Launch, parse
from mindresume.launch.overrides import PREDICT_MODES, apply

NAME = "run_mindformer.py"


def run_pynative(launch: Launch) -> None:
    """Runs the PyNative trainer, which reads the configuration file alone."""
    if launch.mindresume:
        import mindresume.plugin  # noqa: F401  (its import installs everything)
        from mindresume.mindformers.upstream import require_import

        require_import("mindformers.pynative.trainer")
    unused = launch.without_effect_in_pynative()
    if unused:
        say(f"--mode 1 reads the configuration file alone; without effect: {', '.join(unused)}")
    from mindformers.pynative.trainer import Trainer

    trainer = Trainer(launch.config)
    if getattr(trainer, "is_inference", False):  # releases after 1.9.0
        trainer.inference()
    else:
        trainer.train()


def run_graph(launch: Launch) -> None:
    """Runs the graph trainer: configuration, overrides, context, trainer, in this order."""
    if launch.mindresume:
        import mindresume.plugin  # noqa: F401  (its import installs everything)
    from mindformers.core.context import build_context
    from mindformers.tools.register import MindFormerConfig
    from mindformers.trainer import Trainer
    from mindformers.utils.file_utils import set_output_path

    # mindformers' defaults depend on the run mode, so it must be known while the file is read.
    given = {"run_mode": launch.flags["run_mode"]} if "run_mode" in launch.flags else {}
    config = MindFormerConfig(launch.config, **given)
    for note in apply(config, launch):
        say(note)
    set_output_path(config.output_dir)
    build_context(config)
    trainer = Trainer(config)
    if config.run_mode in PREDICT_MODES:
        trainer.predict(
            predict_checkpoint=config.load_checkpoint,
            input_data=config.input_data,
            batch_size=config.predict_batch_size,
            adapter_id=config.adapter_id,
        )
    elif config.run_mode == "eval":
        trainer.evaluate(eval_checkpoint=config.load_checkpoint)
    else:
        trainer.train()


def set_register_path(path: str) -> None:
    """Sets the folder in which ``auto_register`` of mindformers looks for the user's classes."""
    os.environ["REGISTER_PATH"] = path
    if path not in sys.path:
        sys.path.append(path)


def say(text: str) -> None:
    """Prints a line to stderr."""
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 finished (also: nothing left to train), 1 the run failed, 2 a
    wrong argument or setting, 65 the network got other weights than those that were loaded, 66 a
    step that was trained again differs from its first training."""
    launch = parse(argv, os.path.dirname(os.path.abspath(__file__)))
    if "register_path" in launch.flags:
        set_register_path(launch.flags["register_path"])
    rank = os.environ.get("RANK_ID")
    where = f" on rank {rank}" if rank else ""
    try:
        (run_pynative if launch.pynative else run_graph)(launch)
    except TrainingCompleteError as done:
        say(f"[{done.code}] {done}")
    except ConfigError as error:
        say(f"error{where}: [{error.code}] {error}")
        return 2
    except ResumeDifferenceError as error:
        say(f"failed{where}: [{error.code}] {error}")
        return 66
    except AlteredWeightsError as error:
        say(f"failed{where}: [{error.code}] {error}")
        return 65
    except MindResumeError as error:  # the message is complete; a traceback would hide it
        say(f"failed{where}: [{error.code}] {type(error).__name__}: {error}")
        return 1
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        say(f"failed{where}: {type(error).__name__}: {lines[0] if lines else '(no message)'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

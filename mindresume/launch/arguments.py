"""Parses the command line of ``run_mindformer.py``. Changes no configuration.

    launch = parse(sys.argv[1:], script_folder)
    # given flags; key=value pairs in order
    launch.flags["load_checkpoint"], launch.options, launch.free

Names, meaning and order of effect are those of MindSpore Transformers. It imports neither mindspore
nor mindformers, so that ``--help`` and a wrong argument respond at once.

Values are bool, None, int, float, list, tuple, dict or text:

    parse_value("1e-5") == 1e-5      parse_value("[1, [2, x]]") == [1, [2, "x"]]
    parse_value("True") is True      parse_value("{a: 1}") == {"a": 1}
    parse_value("None") is None      parse_value("'1'") == "1"

Plain YAML is not used for single words: it would turn ``on`` into True, ``12:30`` into 750 and
``2024-01-01`` into a date, and would leave ``1e-5`` a string.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "~": None}
_INTEGER = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?((\d+\.\d*|\.\d+|\d+)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)
RUN_MODES = ("train", "finetune", "eval", "predict", "predict_with_train_model")

DESCRIPTION = (
    "Trains, evaluates or predicts with MindSpore Transformers; mindresume saves and resumes."
)

EXAMPLES = """\
any other key of the configuration:
  --key VALUE, --key=VALUE, --a.b.c VALUE
  numbers index lists: --callbacks.1.save_checkpoint_steps 5
  values: True, 1, 1e-5, None, [1, 2], {a: 1}, text; '"1"' is the text 1
  order of effect: flags, --options, data set and runner flags, then these; the later one wins

start:
  python run_mindformer.py --config configs/qwen3.yaml --run_mode train \\
      --train_dataset_dir /data/wiki.mindrecord
resume from the newest usable checkpoint (several devices: scripts/msrun_launcher.sh):
  python run_mindformer.py --config configs/qwen3.yaml \\
      --load_checkpoint ./output/checkpoint --resume_training True
"""


# ---- values --------------------------------------------------------------------------------------


def parse_bool(text: str) -> bool:
    """Parses true/false, 1/0 or yes/no in any case. Raises ValueError for anything else."""
    word = text.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(f"expected true or false (also 1/0, yes/no), got {text!r}")


def parse_bool_or_name(text: str) -> bool | str:
    """Parses a value of ``--resume_training``: a truth value, or the name of a checkpoint. Raises
    ValueError if it is empty."""
    if not text.strip():
        raise ValueError("expected true, false or the name of a checkpoint, got an empty value")
    return parse_bool(text) if text.strip().lower() in TRUE + FALSE else text


def parse_value(text: str, *, split_commas: bool = False) -> Any:
    """Parses the value of a configuration key: bool, None, int, float, list, tuple, dict or str.
    Quoted text stays a string.

    Args:
        split_commas: ``a,b`` is the list ["a", "b"], as in ``--options``.
    Raises:
        ValueError: The text begins like a list, dictionary or quoted string, but is none.
    """
    text = text.strip()
    if text[:1] in ("[", "{", "(", "'", '"'):
        return _structure(text)
    if split_commas and "," in text:
        return _structure(f"[{text}]")
    return _word(text)


def _word(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Loader(yaml.BaseLoader):
    """Loads YAML lists, dictionaries and texts only. ``_word`` parses unquoted words. Tags
    (``!!timestamp``) and references (``*a``), with which a value can contain itself, are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            raise yaml.YAMLError("a reference or a tag")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if node.style:
            return node.value
        if node.value.count("(") != node.value.count(")"):
            # YAML would split it into "(a" and "b)"
            raise yaml.YAMLError("a tuple of unquoted words inside a list")
        return _word(node.value)


def _structure(text: str) -> Any:
    try:
        value = ast.literal_eval(text)  # Python notation, the only one with tuples
        if isinstance(value, (list, tuple, dict, str)):
            return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        # TypeError: a list as a key
        pass  # then it must be YAML
    if text[0] == "(" and text[-1] == ")":
        return tuple(_structure(f"[{text[1:-1]}]"))
    try:
        return yaml.load(
            text, Loader=_Loader
        )  # safe: lists, dictionaries, texts; [true, abc] is YAML
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{text[:200]!r} begins like a list, dictionary or quoted text but cannot be read as "
            "one; check the brackets, or put it in quotes inside the quotes: '\"...\"'"
        ) from error


# ---- flags ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """Describes one flag. ``key``: the configuration key that it sets, None: handled separately.
    ``late``: takes effect after --options. ``many``: takes several values."""

    name: str
    kind: Callable[[str], Any]
    key: str | None
    help: str
    late: bool = False
    many: bool = False
    choices: tuple | None = None


GROUPS: dict[str, tuple[Flag, ...]] = {
    "what to run": (
        Flag("run_mode", str, None, "what to do", choices=RUN_MODES),
        Flag(
            "mode",
            int,
            "context.mode",
            "0: graph mode; 1: PyNative trainer, run from the configuration file alone",
            choices=(0, 1),
        ),
        Flag("device_target", str, "context.device_target", "Ascend, GPU or CPU"),
        Flag("device_id", int, "context.device_id", "device of a run on one device"),
        Flag("use_parallel", parse_bool, "use_parallel", "run on several devices"),
        Flag("seed", int, "seed", "random seed"),
        Flag(
            "output_dir", str, "output_dir", "folder of logs, strategies and checkpoints", late=True
        ),
        Flag(
            "remote_save_url",
            str,
            "remote_save_url",
            "folder in an object store to which the output is uploaded",
        ),
        Flag("profile", parse_bool, "profile", "record a profile"),
        Flag(
            "trust_remote_code",
            parse_bool,
            "trust_remote_code",
            "let a Hugging Face tokenizer run its own code",
            late=True,
        ),
        Flag(
            "register_path", str, None, "folder of your registered classes; relative to this script"
        ),
    ),
    "checkpoint and resume": (
        Flag("load_checkpoint", str, "load_checkpoint", "folder or file to load"),
        Flag(
            "resume_training",
            parse_bool_or_name,
            "resume_training",
            "True: resume from the newest usable checkpoint; or the name of one; False: load "
            "weights only",
        ),
        Flag(
            "auto_trans_ckpt",
            parse_bool,
            "auto_trans_ckpt",
            "convert the checkpoint to the layout of this run",
        ),
        Flag(
            "src_strategy_path_or_dir",
            str,
            "src_strategy_path_or_dir",
            "strategy files of that checkpoint",
        ),
        Flag("transform_process_num", int, "transform_process_num", "processes that convert"),
        Flag(
            "only_save_strategy",
            parse_bool,
            "only_save_strategy",
            "write the strategy files and stop",
        ),
        Flag(
            "strategy_load_checkpoint",
            str,
            None,
            "strategy file to compile with, or the folder that holds it",
        ),
    ),
    "data set and training": (
        Flag(
            "train_dataset_dir",
            str,
            "train_dataset.data_loader.dataset_dir",
            "data to train on; --train_dataset is the same",
            late=True,
        ),
        Flag(
            "eval_dataset_dir",
            str,
            "eval_dataset.data_loader.dataset_dir",
            "data to evaluate on",
            late=True,
        ),
        Flag("do_eval", parse_bool, "do_eval", "evaluate during training"),
        Flag("epochs", int, "runner_config.epochs", "epochs to train", late=True),
        Flag(
            "batch_size",
            int,
            "runner_config.batch_size",
            "samples per step on each data-parallel rank",
            late=True,
        ),
        Flag(
            "gradient_accumulation_steps",
            int,
            "runner_config.gradient_accumulation_steps",
            "steps whose gradients are added up before an update",
            late=True,
        ),
        Flag("sink_mode", parse_bool, "runner_config.sink_mode", "data sink mode", late=True),
        Flag(
            "num_samples",
            int,
            None,
            "samples to use of the training and evaluation data",
            late=True,
        ),
    ),
    "predict": (
        Flag("predict_data", str, None, "texts, files or a folder of images", late=True, many=True),
        Flag("predict_batch_size", int, None, "batch size of a prediction", late=True),
        Flag(
            "modal_type",
            str,
            None,
            "kind of each --predict_data: text, image or video",
            late=True,
            many=True,
        ),
        Flag(
            "adapter_id", str, None, "LoRA adapters to predict with (slora)", late=True, many=True
        ),
        Flag(
            "do_sample",
            parse_bool,
            "model.model_config.do_sample",
            "sample instead of taking the most likely token",
            late=True,
        ),
    ),
}
_METAVARS = {int: "N", parse_bool: "BOOL", parse_bool_or_name: "BOOL|NAME"}
FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}


@dataclass(frozen=True)
class Launch:
    """Holds a parsed command line. ``flags`` holds only the given flags; ``options`` and ``free``
    keep the order of the command line."""

    config: str
    mindresume: bool = True
    flags: dict[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, Any], ...] = ()
    free: tuple[tuple[str, Any], ...] = ()

    @property
    def pynative(self) -> bool:
        """Whether the PyNative trainer runs."""
        return self.flags.get("mode") == 1

    def without_effect_in_pynative(self) -> list[str]:
        """Returns the given arguments that have no effect on the PyNative trainer, which reads the
        configuration file alone."""
        return (
            [f"--{name}" for name in self.flags if name not in ("mode", "register_path")]
            + ["--options"] * bool(self.options)
            + [f"--{key}" for key, _ in self.free]
        )


def parse(argv: Sequence[str], folder: str) -> Launch:
    """Parses the arguments. Relative paths of --config and --register_path are relative to
    ``folder``, that of the script.

    A wrong argument ends the process with status 2; the last printed line names the flag, as with
    argparse.
    """
    parser = _build_parser()
    # A separate option --train_dataset would make abbreviations such as --train_data ambiguous.
    argv = [re.sub(r"\A--train_dataset(?==|\Z)", "--train_dataset_dir", word) for word in argv]
    given, rest = parser.parse_known_args(argv)
    try:
        options = tuple(_pair(word) for word in given.options or ())
        free = tuple(_free_pairs(rest))
        config = find_file(given.config, folder)
        flags = {name: getattr(given, name) for name in FLAGS if getattr(given, name) is not None}
        if "register_path" in flags:
            flags["register_path"] = _register_folder(flags["register_path"], folder)
    except ValueError as error:
        parser.error(str(error))
    return Launch(config, given.mindresume, flags, options, free)


def find_file(path: str, folder: str) -> str:
    """Returns the path of the configuration file: absolute, in ``folder``, or in the working
    directory. Raises ValueError if there is none."""
    candidates = list(dict.fromkeys((os.path.join(folder, path), os.path.abspath(path))))
    for candidate in candidates:
        if os.path.isfile(candidate):
            if not candidate.endswith((".yaml", ".yml")):
                raise ValueError(f"argument --config: {candidate} must end in .yaml or .yml")
            return candidate
    raise ValueError(f"argument --config: no such file: {' or '.join(candidates)}")


def _register_folder(path: str, folder: str) -> str:
    path = os.path.join(folder, path)
    if not os.path.isdir(path):
        raise ValueError(f"argument --register_path: no such folder: {path}")
    return path


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "run_mindformer.py",
        usage="run_mindformer.py --config FILE.yaml [flags] [--key value ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE.yaml",
        help="configuration; looked up beside this script, then in the working directory",
    )
    parser.add_argument(
        "--options",
        nargs="+",
        action="extend",
        metavar="KEY=VALUE",
        help="set keys of the configuration: runner_config.sink_size=2 callbacks.1.prefix=abc",
    )
    parser.add_argument(
        "--no-mindresume",
        "--no_mindresume",
        dest="mindresume",
        action="store_false",
        help="use the checkpoint code of MindSpore Transformers itself",
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            kind = flag.kind if flag.kind in (str, int) else partial(_parsed, flag)
            group.add_argument(
                f"--{flag.name}",
                type=kind,
                nargs="+" if flag.many else None,
                default=None,
                help=flag.help,
                choices=flag.choices,
                metavar=None if flag.choices else _METAVARS.get(flag.kind, "TEXT"),
            )
    return parser


def _parsed(flag: Flag, text: str) -> Any:
    """Returns the value of a flag. argparse prints the name of the flag before the message of an
    ArgumentTypeError."""
    try:
        return flag.kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _pair(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ValueError(f"argument --options: expected KEY=VALUE, got {word!r}")
    try:
        return key, parse_value(text, split_commas=True)
    except ValueError as error:
        raise ValueError(f"argument --options {key}: {error}") from error


def _free_pairs(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the pairs of ``--key value`` and ``--key=value``; only the first = separates."""
    pairs, words = [], list(words)
    while words:
        word = words.pop(0)
        key, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(
                f"unexpected argument {word!r}: it follows no flag; other keys of the "
                "configuration are written --key value or --key=value"
            )
        if not equals:
            if not words or (words[0].startswith("--") and words[0] != "--"):
                raise ValueError(
                    f"argument --{key}: expected a value (--{key} VALUE or --{key}=VALUE)"
                )
            text = words.pop(0)
        try:
            pairs.append((key, parse_value(text)))
        except ValueError as error:
            raise ValueError(f"argument --{key}: {error}") from error
    return pairs

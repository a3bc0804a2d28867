"""run_mindformer.py and mindresume.launch: what the command line means, what it writes, in what
order things run.

The flow is tested with a fake ``mindformers`` and a fake ``mindresume.plugin`` that record what is
done with them.
"""

import copy
import importlib.util
import math
import os
import re
import resource
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import yaml
from launches import override, parsed

import mindresume
from mindresume.errors import ConfigError, NoUsableCheckpointError, TrainingCompleteError

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "run_mindformer.py"

CONFIG = """
run_mode: train
load_checkpoint: ''
resume_training: False
ignore_data_skip: False
data_skip_steps:
context: {mode: 0, device_target: Ascend}
parallel: {parallel_mode: 1}
runner_config: {epochs: 1, batch_size: 1, sink_mode: True, sink_size: 2}
train_dataset: {data_loader: {type: MindDataset, dataset_dir: ''}}
eval_dataset:
trainer: {type: CausalLanguageModelingTrainer, model_name: tiny}
model: {model_config: {vocab_size: 8, pet_config: {pet_type: lora}}}
callbacks:
  - {type: MFLossMonitor}
  - {type: CheckpointMonitor, prefix: qwen3, save_checkpoint_steps: 10}
"""


class Config(dict):
    """Is like MindFormerConfig: keys are attributes, a missing one is None, sections are Configs,
    lists hold plain dicts."""

    def __init__(self, **keys):
        super().__init__({k: Config(**v) if isinstance(v, dict) else v for k, v in keys.items()})

    def __getattr__(self, key):
        return self.get(key)


@pytest.fixture
def config():
    return Config(**yaml.safe_load(CONFIG))


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def run(yaml_file, config):
    """Returns a function: command line -> (configuration after it, remarks)."""

    def run(*argv):
        notes = override(config, ["--config", yaml_file, *argv])
        return config, notes

    return run


def refusal(capsys, *argv):
    """Returns the last line that argparse prints for a wrong command line."""
    with pytest.raises(SystemExit) as stop:
        parsed(*argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("~", None),
        ("1", 1),
        ("007", 7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("inf", math.inf),
        ("", ""),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("a: b", "a: b"),
        ("#1", "#1"),
        ("'1'", "1"),
        ('"True"', "True"),
        ("[[1,1],[4,1]]", [[1, 1], [4, 1]]),
        ("((1,1),(4,1))", ((1, 1), (4, 1))),
        ("[true, None, 1e-5, on, '1']", [True, None, 1e-5, "on", "1"]),
        ("{a: 1, b: [x, False]}", {"a": 1, "b": ["x", False]}),
        ('{"a": true}', {"a": True}),
    ],
)
def test_a_text_becomes_a_value(run, text, value):
    config, _ = run(f"--context.a={text}")
    assert config.context.a == value and type(config.context.a) is (
        Config if isinstance(value, dict) else type(value)
    )


@pytest.mark.parametrize("text", ["[1, 2", "{a: 1", "(1, 2", "'abc", "[1]]", "[(a, b), c]"])
def test_unclosed_brackets_are_refused(capsys, yaml_file, text):
    assert "brackets" in refusal(capsys, "--config", yaml_file, f"--context.a={text}")


@pytest.mark.parametrize(
    "text",
    [
        "{{}}",
        "{[1]: 2}",
        "[!!timestamp foo]",
        "[!!int '']",
        "[!!float x]",
        "[!!binary 1]",
        "[&a [*a]]",
        "{a: &b 1, c: *b}",
        "[!!python/name:os.system ]",
        "[" * 1500 + "]" * 1500,
        "{? [1] : 2}",
        "[!!omap [a]]",
        "[" + "9" * 5000 + "]",
        "{<<: 1}",
    ],
    ids=lambda text: text[:20],
)
def test_invalid_values_are_refused_in_a_short_line(capsys, yaml_file, text, request):
    # as in the script: MindSpore raises it
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)
    try:
        assert dict(parsed("--config", yaml_file, f"--context.a={text}").free)["context.a"] in (
            {"<<": 1},
        )
    except SystemExit:
        assert len(capsys.readouterr().err.splitlines()[-1]) < 500


def test_commas_make_a_list_only_in_options(run):
    config, _ = run("--options", "context.a=1,x,True", "--context.b", "1,x,True")
    assert (config.context.a, config.context.b) == ([1, "x", True], "1,x,True")


def test_resume_training_accepts_a_name(run, capsys, yaml_file):
    assert (
        run("--resume_training", "qwen3_rank_0-2_5.safetensors")[0].resume_training
        == "qwen3_rank_0-2_5.safetensors"
    )
    assert "empty" in refusal(capsys, "--config", yaml_file, "--resume_training", " ")


# --------------------------------------------------------------------------------------------------

# (flag of mindformers' own script, text, key that it sets, value)
FLAGS = [
    ("mode", "0", "context.mode", 0),
    ("device_id", "3", "context.device_id", 3),
    ("device_target", "CPU", "context.device_target", "CPU"),
    ("run_mode", "finetune", "run_mode", "finetune"),
    ("do_eval", "yes", "do_eval", True),
    ("seed", "7", "seed", 7),
    ("use_parallel", "0", "use_parallel", False),
    ("load_checkpoint", "./ckpt", "load_checkpoint", "./ckpt"),
    ("src_strategy_path_or_dir", "s", "src_strategy_path_or_dir", "s"),
    ("auto_trans_ckpt", "1", "auto_trans_ckpt", True),
    ("transform_process_num", "2", "transform_process_num", 2),
    ("only_save_strategy", "no", "only_save_strategy", False),
    ("resume_training", "TRUE", "resume_training", True),
    ("strategy_load_checkpoint", "s.ckpt", "parallel.strategy_ckpt_load_file", "s.ckpt"),
    ("remote_save_url", "obs://x", "remote_save_url", "obs://x"),
    ("profile", "true", "profile", True),
    ("train_dataset_dir", "d", "train_dataset.data_loader.dataset_dir", "d"),
    ("train_dataset", "d", "train_dataset.data_loader.dataset_dir", "d"),
    ("train_data", "d", "train_dataset.data_loader.dataset_dir", "d"),
    ("epochs", "3", "runner_config.epochs", 3),
    ("batch_size", "4", "runner_config.batch_size", 4),
    ("gradient_accumulation_steps", "2", "runner_config.gradient_accumulation_steps", 2),
    ("sink_mode", "False", "runner_config.sink_mode", False),
    ("num_samples", "9", "train_dataset.data_loader.num_samples", 9),
    ("output_dir", "out", "output_dir", "out"),
    ("trust_remote_code", "True", "trust_remote_code", True),
    ("do_sample", "False", "model.model_config.do_sample", False),
]


@pytest.mark.parametrize(("flag", "text", "key", "value"), FLAGS)
def test_flag_sets_its_key_and_nothing_else(run, config, flag, text, key, value):
    expected = copy.deepcopy(dict(config))
    node = expected
    *parents, last = key.split(".")
    for part in parents:
        node = node[part]
    node[last] = value
    assert run(f"--{flag}", text) == (expected, [])
    assert run(f"--{flag}={text}") == (expected, [])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--sink_mode", "ture"],
            "run_mindformer.py: error: argument --sink_mode: expected true or false (also 1/0, "
            "yes/no), got 'ture'",
        ),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--mode", "2"], "argument --mode: invalid choice: 2"),
        (["--run_mode", "trian"], "argument --run_mode: invalid choice: 'trian'"),
        (["--options", "a.b"], "argument --options: expected KEY=VALUE, got 'a.b'"),
        (["--options", "a.b=[1"], "argument --options a.b: '[1' begins like a list"),
        (["--a.b"], "argument --a.b: expected a value"),
        (["--a.b", "--c.d", "1"], "argument --a.b: expected a value"),
        (["--a.b", "1", "stray"], "unexpected argument 'stray'"),
        (
            ["--register_path", "no/such"],
            f"argument --register_path: no such folder: {ROOT}/no/such",
        ),
    ],
)
def test_wrong_command_line(capsys, yaml_file, argv, words):
    assert words in refusal(capsys, "--config", yaml_file, *argv)


def test_config_file(capsys, tmp_path, yaml_file, monkeypatch):
    assert "--config" in refusal(capsys, "--epochs", "1")
    assert "no such file" in refusal(capsys, "--config", "absent.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "tiny.yaml").write_text(CONFIG)
    # the script's first
    for script, found in (("beside", str(tmp_path / "beside" / "tiny.yaml")), ("empty", yaml_file)):
        assert parsed("--config", "tiny.yaml", script=tmp_path / script).config == found
    (tmp_path / "tiny.json").write_text("{}")
    assert "must end in .yaml" in refusal(capsys, "--config", "tiny.json")


def test_num_samples_needs_no_eval_dataset(run, config):
    config["eval_dataset"] = Config(data_loader={"type": "MindDataset"})
    changed, _ = run("--num_samples", "5")
    assert (
        changed.train_dataset.data_loader.num_samples
        == changed.eval_dataset.data_loader.num_samples
        == 5
    )


def test_a_data_set_flag_without_data_set_is_an_error(run, config):
    with pytest.raises(
        ConfigError,
        match="--eval_dataset_dir: eval_dataset is empty, so it has no key 'data_loader'",
    ):
        run("--eval_dataset_dir", "d")
    # an empty shell variable: as if not given
    assert run("--eval_dataset_dir", "")[0] == config


def test_strategy_folder(run, tmp_path, monkeypatch):
    def taken():
        return run("--strategy_load_checkpoint", str(tmp_path / "strategy"))[
            0
        ].parallel.strategy_ckpt_load_file

    monkeypatch.delenv("RANK_ID", raising=False)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds 0 files"):
        taken()
    (tmp_path / "strategy" / "a.ckpt").touch()
    assert taken() == str(tmp_path / "strategy" / "a.ckpt")
    for rank in (1, 11):
        (tmp_path / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").touch()
    with pytest.raises(ConfigError, match="0 of them of this rank"):
        taken()
    monkeypatch.setenv("RANK_ID", "1")
    assert taken() == str(tmp_path / "strategy" / "ckpt_strategy_rank_1.ckpt")


def test_predict(run, config, tmp_path):
    config["model"]["model_config"]["pet_config"]["pet_type"] = "slora"
    changed, _ = run(
        "--run_mode",
        "predict",
        "--predict_data",
        r"a\nb",
        "--predict_batch_size",
        "2",
        "--adapter_id",
        "x",
        "y",
    )
    assert (changed.input_data, changed.predict_batch_size, changed.adapter_id) == (
        "a\nb",
        2,
        ["x", "y"],
    )
    (tmp_path / "sub").mkdir()
    for name in ("b.JPG", "a.txt", "sub/c.png"):
        (tmp_path / name).touch()

    def given(*data, kinds=()):
        return run(
            "--run_mode",
            "predict",
            *(["--predict_data", *data] if data else []),
            *(["--modal_type", *kinds] if kinds else []),
        )[0].input_data

    assert given(str(tmp_path)) == [f"{tmp_path}/b.JPG", f"{tmp_path}/sub/c.png"]
    assert given("a", "b") == ["a", "b"] and given() is None
    assert given("a.png", "what?", kinds=["Image", "text"]) == [
        [{"image": "a.png"}, {"text": "what?"}]
    ]
    for data, kinds, words in (
        ("a", ["text", "text"], "one kind for each"),
        ("a", ["sound"], "expected text, image"),
        ("a.txt", ["image"], "ends in one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            given(data, kinds=kinds)


# --------------------------------------------------------------------------------------------------


def test_options_and_free_keys(run):
    config, notes = run(
        "--options",
        "resume_training=True",
        "callbacks.1.save_checkpoint_steps=5",
        "parallel.s=a=b",
        "--callbacks.1.prefix=x=y",
        "--runner_config.sink_size",
        "-1",
        "--options",
        "context.mode=1",
    )
    assert config.resume_training is True
    assert config.callbacks[1] == {
        "type": "CheckpointMonitor",
        "prefix": "x=y",
        "save_checkpoint_steps": 5,
    }
    assert (config.runner_config.sink_size, config.context.mode, config.parallel.s) == (
        -1,
        1,
        "a=b",
    )
    assert notes == ["--options parallel.s adds a key that parallel did not have"]


def test_order_of_effect(run):
    config, _ = run(
        "--seed",
        "1",
        "--epochs",
        "1",
        "--options",
        "seed=2",
        "runner_config.epochs=2",
        "runner_config.a=2",
        "--runner_config.a=3",
        "--runner_config.a=4",
    )
    assert (config.seed, config.runner_config.epochs, config.runner_config.a) == (2, 1, 4)


def test_a_section_becomes_a_configuration(run):
    config, _ = run(
        "--checkpoint", "{load_path: ./ckpt, deep: {a: 1}}", "--checkpoint.no_load_optim", "False"
    )
    assert config.checkpoint == {"load_path": "./ckpt", "deep": {"a": 1}, "no_load_optim": False}
    assert config.checkpoint.deep.a == 1
    with pytest.raises(ConfigError, match="keys of a section must be text"):
        run("--checkpoint", "{1: 2}")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "checkpoint.load_path",
            [
                "the configuration has no key 'checkpoint'",
                "callbacks, context",
                "checkpoint='{key: value}'",
            ],
        ),
        ("runer_config.epochs", ["did you mean 'runner_config'?"]),
        (
            "runner_config.x.y",
            ["runner_config has no key 'x'", "it has: batch_size, epochs, sink_mode, sink_size"],
        ),
        (
            "callbacks.2.prefix",
            [
                "callbacks is a list of 2 entries, '2' is none of them",
                "0: MFLossMonitor, 1: CheckpointMonitor",
            ],
        ),
        ("callbacks.first", ["'first' is none of them"]),
        ("callbacks.-1.prefix", ["'-1' is none of them"]),
        ("eval_dataset.data_loader", ["eval_dataset is empty", "eval_dataset=VALUE"]),
        ("run_mode.x.y", ["run_mode is 'train', not a section"]),
        ("context.", ["ends in a dot"]),
    ],
)
def test_missing_parent_is_named_and_nothing_changes(run, config, key, words):
    before = copy.deepcopy(dict(config))
    with pytest.raises(ConfigError) as error:
        run("--options", f"{key}=1")
    assert all(word in str(error.value) for word in [f"--options {key}: ", *words])
    assert config == before


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("load_chekpoint", "load_checkpoint"),
        ("resume_trainig", "resume_training"),
        ("load_checkpoints", "load_checkpoint"),
        ("no_mindresumes", "no-mindresume"),
    ],
)
def test_misspelled_flag_is_an_error(run, key, meant):
    with pytest.raises(ConfigError, match=f"did you mean --{meant}"):
        run(f"--{key}", "x")


def test_a_new_key_similar_to_another_is_reported(run):
    assert run("--remove_redundancy", "True", "--checkpoint", "{load_path: x}")[1] == []
    assert run("--my_own_key", "1")[1] == [
        "--my_own_key adds a key that the configuration did not have"
    ]
    assert run("--runner_config.sink_sise", "2")[1][0].endswith("; did you mean 'sink_size'?")


def test_run_mode_of_the_file_is_checked(run, config):
    config["run_mode"] = "pretrain"
    with pytest.raises(
        ConfigError, match="run_mode is 'pretrain'; expected one of train, finetune"
    ):
        run()


# --------------------------------------------------------------------------------------------------


def test_documented_data_skip_keys_are_lifted(run, config):
    """What the command line says, counts."""
    for flags, steps in (((), 4), (("--data_skip_steps", "6"), 6)):
        config["trainer"].update(ignore_data_skip=True, data_skip_steps=4)
        config["data_skip_steps"] = None
        changed, notes = run(*flags)
        assert (changed.ignore_data_skip, changed.data_skip_steps) == (True, steps)
        assert changed.trainer == {"type": "CausalLanguageModelingTrainer", "model_name": "tiny"}
        assert len(notes) == 2
    config["trainer"]["data_skip_steps"] = 5
    with pytest.raises(
        ConfigError, match="data_skip_steps is 6 at the top level .* but 5 in trainer"
    ):
        run()


def test_line_of_the_plug_in_is_dropped(run, config):
    config["trainer"]["auto_register"] = "mindresume_plugin.MindResume"
    changed, notes = run()
    assert "auto_register" not in changed.trainer and "not needed" in notes[0]
    config["trainer"]["auto_register"] = "mine.Trainer"
    assert run()[0].trainer.auto_register == "mine.Trainer"


def test_plug_in_file_passes_the_checks_of_auto_register():
    """mindformers searches the text, docstrings included, for lines that begin with import or
    from."""
    path = ROOT / "mindresume" / "mindformers" / "shim" / "mindresume_plugin.py"
    text = path.read_text()
    found = re.findall(r"^\s*(?:import|from)\b.*$", text, re.MULTILINE)
    assert [line.strip() for line in found] == ["import mindresume.plugin"]
    assert "class MindResume:" in text and "auto_register: mindresume_plugin.MindResume " in text


# --------------------------------------------------------------------------------------------------

FAKES = {
    "mindformers/__init__.py": "",
    "mindformers/core/__init__.py": "",
    "mindformers/core/context.py": "from recorder import EVENTS\ndef build_context(c): "
    "EVENTS.append(('context', c.seed))\n",
    "mindformers/tools/__init__.py": "",
    "mindformers/tools/register.py": "from recorder import MindFormerConfig\n",
    "mindformers/utils/__init__.py": "",
    "mindformers/utils/file_utils.py": "from recorder import EVENTS\ndef set_output_path(p): "
    "EVENTS.append(('output', p))\n",
    "mindformers/trainer.py": "from recorder import Trainer\n",
    "mindformers/pynative/__init__.py": "",
    "mindformers/pynative/trainer.py": "from recorder import PynativeTrainer as Trainer\n",
    "hooks/plugin/__init__.py": "from recorder import EVENTS\nEVENTS.append(('plugin',))\n",
    "recorder.py": """
import yaml
from tests_config import Config
EVENTS, FAIL = [], []
def MindFormerConfig(path, **given):
    EVENTS.append(("read", given))
    return Config(**{**yaml.safe_load(open(path)), **given})
class Trainer:
    def __init__(self, config):
        self.config = config
        EVENTS.append(("Trainer", config.load_checkpoint))
    def train(self):
        EVENTS.append(("train",))
        for error in FAIL:
            raise error
    def evaluate(self, **keys): EVENTS.append(("evaluate", keys))
    def predict(self, **keys): EVENTS.append(("predict", keys))
class PynativeTrainer:
    def __init__(self, path): EVENTS.append(("pynative", path))
    def train(self): EVENTS.append(("train",))
""",
}


@pytest.fixture
def script(tmp_path, yaml_file, monkeypatch):
    """Runs main(argv) of run_mindformer.py with the fakes: returns its status; ``script.events``
    lists the calls."""

    def loaded():
        return [
            name
            for name in sys.modules
            if name.split(".")[0] in ("mindformers", "recorder", "tests_config")
            or name.startswith("mindresume.plugin")
        ]

    for name, text in FAKES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    saved = {name: sys.modules.pop(name) for name in loaded()}
    before = mindresume.__dict__.get("plugin")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mindresume, "__path__", [str(tmp_path / "hooks"), *mindresume.__path__])
    for name in ("RANK_ID", "REGISTER_PATH"):
        monkeypatch.setenv(name, "")
    sys.modules["tests_config"] = types.SimpleNamespace(Config=Config)
    import recorder

    spec = importlib.util.spec_from_file_location("run_mindformer_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def main(*argv):
        recorder.EVENTS.clear()
        return module.main(["--config", yaml_file, *argv])

    main.events, main.fail = recorder.EVENTS, recorder.FAIL
    yield main
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(saved)
    mindresume.__dict__.pop("plugin", None)
    if before is not None:
        mindresume.plugin = before


def test_flow_of_a_training(script):
    assert (
        script(
            "--load_checkpoint", "c", "--seed", "3", "--run_mode", "finetune", "--output_dir", "o"
        )
        == 0
    )
    assert script.events == [
        ("plugin",),
        ("read", {"run_mode": "finetune"}),
        ("output", "o"),
        ("context", 3),
        ("Trainer", "c"),
        ("train",),
    ]


def test_no_mindresume(script):
    for flag in ("--no-mindresume", "--no_mindresume"):
        assert script(flag) == 0
        assert ("plugin",) not in script.events and script.events[-1] == ("train",)


def test_flow_of_eval_and_predict(script):
    script("--run_mode", "eval", "--load_checkpoint", "c")
    assert script.events[-1] == ("evaluate", {"eval_checkpoint": "c"})
    script("--run_mode", "predict", "--load_checkpoint", "c", "--predict_data", "hello")
    assert script.events[-1] == (
        "predict",
        {"predict_checkpoint": "c", "input_data": "hello", "batch_size": None, "adapter_id": None},
    )


@pytest.mark.parametrize("words, installed", [((), [("plugin",)]), (("--no-mindresume",), [])])
def test_pynative_runs_the_file_alone(script, capsys, yaml_file, words, installed):
    assert script("--mode", "1", "--epochs", "3", "--options", "a=1", "--b.c", "2", *words) == 0
    assert script.events == [*installed, ("pynative", yaml_file), ("train",)]
    assert "without effect: --epochs, --options, --b.c" in capsys.readouterr().err


def test_register_path(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert script("--register_path", "mindresume") == 0
    assert os.environ["REGISTER_PATH"] == str(ROOT / "mindresume") == sys.path[-1]
    script("--register_path", str(tmp_path))
    assert os.environ["REGISTER_PATH"] == str(tmp_path)


@pytest.mark.parametrize(
    ("error", "status", "trace", "last"),
    [
        (
            RuntimeError("Device lost\nlong story"),
            1,
            True,
            "run_mindformer.py: failed on rank 2: RuntimeError: Device lost",
        ),
        (
            NoUsableCheckpointError("out holds, but none can be used:\n  step 5: truncated"),
            1,
            False,
            "  step 5: truncated",
        ),
        (TrainingCompleteError("step 20 of 20 is done"), 0, False, "step 20 of 20 is done"),
    ],
)
def test_the_end_of_a_training_that_raised(script, capsys, monkeypatch, error, status, trace, last):
    monkeypatch.setenv("RANK_ID", "2")
    script.fail.append(error)
    assert script() == status
    err = capsys.readouterr().err
    assert ("Traceback" in err) is ("long story" in err) is trace
    assert err.splitlines()[-1].endswith(last)


def test_wrong_setting_ends_with_its_text_alone(script, capsys):
    assert script("--callbacks.7.prefix", "x") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "run_mindformer.py: error: [MR-101] --callbacks.7.prefix: callbacks is a list"
    )
    assert ("train",) not in script.events


def test_help_and_errors_answer_at_once():
    """Less than half a second of processor time: neither mindspore nor mindformers is imported."""

    def cost(*argv):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, SCRIPT, *argv], capture_output=True, text=True, cwd="/", check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    done, seconds = cost("--help")
    assert (done.returncode, done.stderr) == (0, "") and seconds < 0.5
    for word in (
        "start:",
        "resume from",
        "--callbacks.1.save_checkpoint_steps 5",
        "checkpoint and resume:",
        *(f"--{flag}" for flag, *_ in FLAGS),
        *("--config", "--eval_dataset_dir", "--predict_data", "--modal_type", "--adapter_id"),
        *("--predict_batch_size", "--options", "--register_path"),
    ):
        assert word in done.stdout
    done, seconds = cost("--config", "absent.yaml")
    assert done.returncode == 2 and seconds < 0.5
    assert done.stderr.splitlines()[-1].startswith(
        "run_mindformer.py: error: argument --config: no such file: "
    )

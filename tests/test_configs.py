"""The files of the cookbook: mindformers and mindresume know each key, the comments say what to
change, each file is described in docs/cookbook.md and run by st/test_cookbook.py."""

import re
from pathlib import Path

import pytest
import yaml
from launches import KEYS, MONITOR, override

from mindresume.settings import Settings

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
FILES = sorted(
    path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith("quickstart_")
)
SCENARIOS = [name for name in FILES if name != "base.yaml"]
every_file = pytest.mark.parametrize("name", FILES)
every_scenario = pytest.mark.parametrize("name", SCENARIOS)


def merged(name: str) -> dict:
    """Returns a configuration with that of its base_config, as mindformers merges them
    (tools/register/config.py)."""

    def merge(over: dict, below: dict) -> dict:
        return below | {
            key: merge(value, below[key])
            if isinstance(value, dict) and isinstance(below.get(key), dict)
            else value
            for key, value in over.items()
        }

    own = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    base = own.pop("base_config", None)
    return merge(own, merged(base)) if base else own


def comments(name: str) -> str:
    return "\n".join(
        line.partition("#")[2]
        for line in (CONFIGS / name).read_text(encoding="utf-8").splitlines()
        if "#" in line
    )


def test_there_is_a_file_for_each_scenario_of_the_documents():
    assert set(SCENARIOS) == {
        "resume.yaml",
        "automatic_recovery.yaml",
        "change_strategy.yaml",
        "incremental.yaml",
        "change_batch_size.yaml",
        "new_dataset.yaml",
        "checkpoint_2.yaml",
        "huggingface.yaml",
        "modelarts.yaml",
        "supervisor.yaml",
    }


@pytest.fixture(scope="module")
def register():
    """Returns the package of mindformers that reads configurations."""
    pytest.importorskip("mindformers.tools")
    from mindformers.tools import register

    return register


@every_file
def test_mindformers_knows_every_key(register, name):
    expected = merged(name)
    known = {
        *register.template.CONFIG_NAME_TO_CLASS,
        *register.template.GeneralConfig.keys(),
        *KEYS,
    }
    assert set(expected) <= known
    # KeyError for a wrong key of a section
    found = register.MindFormerConfig(str(CONFIGS / name), run_mode="train")
    assert "base_config" not in found
    for section in (
        "context",
        "runner_config",
        "lr_schedule",
        "parallel_config",
        "train_dataset",
        "mindresume",
        "trainer",
    ):
        for key, value in (expected.get(section) or {}).items():
            assert found[section][key] == value, (section, key)


@every_file
def test_mindresume_knows_every_key(name):
    config = merged(name)
    # ConfigError for a wrong key
    Settings.load(config.get("mindresume"), {})
    for callback in config["callbacks"]:
        assert callback["type"] != "CheckpointMonitor" or set(callback) <= MONITOR | {"type"}
    notes = override(config, ["--config", f"configs/{name}"])
    # moved to where mindformers reads it
    assert all("ignore_data_skip" in note for note in notes)


@every_file
def test_it_is_meant_for_ascend(name):
    config = merged(name)
    assert (
        config["context"]["device_target"] == "Ascend"
        and config["runner_config"]["sink_mode"] is True
    )
    parallel, dp = config["parallel_config"], config["parallel_config"]["data_parallel"]
    assert config["use_parallel"] == (
        dp * parallel["model_parallel"] * parallel["pipeline_stage"] > 1
    )
    assert config["parallel"]["dataset_strategy"] == [[dp, 1]] * 4
    assert config["load_checkpoint"] == "./output/checkpoint" and config["resume_training"] is True
    (monitor,) = (row for row in config["callbacks"] if row["type"] == "CheckpointMonitor")
    assert monitor["checkpoint_format"] == config["load_ckpt_format"]


@every_scenario
def test_it_says_how_to_start_it_and_what_to_change(name):
    text = comments(name)
    devices = merged(name)["parallel_config"]
    number = devices["data_parallel"] * devices["model_parallel"] * devices["pipeline_stage"]
    assert (
        f'bash scripts/msrun_launcher.sh "run_mindformer.py --config configs/{name}" {number}'
        in text
    )
    assert (
        re.search(r"^ change: your own YAML", text, re.MULTILINE)
        and len(re.findall(r"\bchange\b", text, re.IGNORECASE)) > 1
    )


@every_file
def test_it_is_described_and_run(name):
    for page in ("docs/cookbook.md", "docs/cookbook.zh.md"):
        assert f"configs/{name}" in (ROOT / page).read_text(encoding="utf-8"), page
    assert f'"{name}"' in (ROOT / "st" / "test_cookbook.py").read_text(encoding="utf-8")

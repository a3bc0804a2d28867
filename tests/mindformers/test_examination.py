"""What ``mindresume doctor`` says of a configuration."""

import json

import pytest

pytest.importorskip("mindformers.tools")

from mindresume.errors import ConfigError  # noqa: E402
from mindresume.mindformers import upstream  # noqa: E402
from mindresume.mindformers.examination import (  # noqa: E402
    NOTE,
    OK,
    WRONG,
    configuration,
    main,
)


@pytest.mark.parametrize(
    "text, about, state, what",
    [
        ("callbacks: []", "saves", WRONG, "no CheckpointMonitor"),
        (
            "callbacks: [{type: CheckpointMonitor, save_checkpoint_steps: 7, async_save: True}]",
            "saves",
            OK,
            "Checkpoint 1.0, ckpt, every 7 steps, the newest 5 stay, in the background",
        ),
        (
            "{use_legacy_format: False, callbacks: [{type: CheckpointMonitor, "
            "checkpoint_format: safetensors, save_checkpoint_seconds: 600}]}",
            "saves",
            OK,
            "Checkpoint 2.0, safetensors, every 600 s",
        ),
        ("callbacks: [{type: CheckpointMonitor, enc_key: a}]", "saves", NOTE, "enc_key is set"),
        ("callbacks: [{type: CheckpointMonitor}]", "resume", NOTE, "begins at step 0"),
        ("load_checkpoint: /weights", "resume", NOTE, "weights alone, of /weights"),
        ("{load_checkpoint: ./output, resume_training: True}", "resume", OK, "in ./output"),
        (
            "{load_checkpoint: ./out, resume_training: True}",
            "resume",
            NOTE,
            "does not exist yet, so the first start is fresh; this training saves to "
            "./output/checkpoint, where a restart does not look",
        ),
        ("{trainer: {type: T, auto_register: mindresume_plugin.M}}", "active", OK, "loads it"),
        ("output_dir: ./out", "active", NOTE, "does not load it"),
        ("remote_save_url: obs://bucket/x", "uploads", NOTE, "is ignored"),
        ("mindresume: {memory_tier: {every_steps: 5}}", "memory tier", OK, "every 5 steps"),
        ("context: {mode: 1}", "trainer", OK, "PyNative"),
    ],
)
def test_what_mindresume_will_do(tmp_path, text, about, state, what):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    (row,) = [row for row in configuration(str(path))[0] if row[0] == about]
    assert row[1] == state and what in row[2], row
    # what is not as it could be has a remedy
    assert state == OK or row[3]


@pytest.mark.parametrize(
    "text, what",
    [
        ("mindresume: {every: 1}", "unknown key 'every'"),
        ("{checkpoint: {load_path: /a}, load_checkpoint: /b}", "load_path is /a"),
        ("load_checkpoint: [1", "cannot be read: while parsing a flow sequence in .* line 1"),
        ("- a", r"it holds \['a'\]; expected sections"),
        ("callbacks: 5", "callbacks is 5; expected a list"),
    ],
)
def test_what_a_training_would_refuse_is_refused(tmp_path, text, what):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        configuration(str(path))


def test_what_was_found_before_an_error_is_told(monkeypatch, capsys):
    def refuse(*_):
        raise ConfigError("a symbol is missing")

    monkeypatch.setattr(upstream, "require", refuse)
    main("")
    rows = json.loads(capsys.readouterr().out)["checks"]
    assert [row[0] for row in rows] == ["releases", "installation"]
    assert rows[1][1:3] == [WRONG, "a symbol is missing"]

from dataclasses import dataclass
from functools import partial

import pytest

from mindresume.errors import ConfigError
from mindresume.settings import MemoryTierSettings, Settings, _section


def test_defaults_section_and_environment():
    assert Settings.load(None, {}) == Settings()
    assert Settings.load({"on_save_error": "raise", "commit_timeout": 5}, {}).commit_timeout == 5.0
    assert (
        Settings.load(
            {"on_save_error": "raise"}, {"MINDRESUME_ON_SAVE_ERROR": "warn"}
        ).on_save_error
        == "warn"
    )
    assert Settings.load({}, {"MINDRESUME_MAX_FAILED_SAVES": "0"}).max_failed_saves == 0


def test_off_without_quotes_is_off():
    """YAML reads it as a flag."""
    assert Settings.load({"proof": False}, {}).proof == "off"
    assert Settings.load({}, {"MINDRESUME_PROOF": "off"}).proof == "off"


def test_keys_of_retention():
    off = Settings.load({}, {}).retention
    assert (off.keep_every_steps, off.keep_best, off.keep_best_metric, off.keep_best_mode) == (
        0,
        0,
        "loss",
        "min",
    )
    found = Settings.load(
        {"keep_every_steps": 1000, "keep_best": 2, "keep_best_mode": "max"},
        {"MINDRESUME_KEEP_BEST_METRIC": "bleu", "MINDRESUME_KEEP_BEST": "3"},
    ).retention
    assert (
        found.keep_every_steps,
        found.keep_best,
        found.keep_best_metric,
        found.keep_best_mode,
    ) == (1000, 3, "bleu", "max")


@pytest.mark.parametrize(
    "section, word",
    [
        ({"on_save_errors": "warn"}, "on_save_errors"),
        ({"on_save_error": "ignore"}, "warn, raise"),
        ({"commit_timeout": "soon"}, "commit_timeout"),
        ({"commit_timeout": -1}, "at least 0"),
        ({"keep_best_metric": ""}, "keep_best_metric"),
        ({"keep_best_metric": " "}, "not empty"),
        ({"keep_best_metric": 3}, "text"),
        ({"keep_best_mode": "least"}, "min, max"),
        ({"keep_best": -1}, "at least 0"),
        ({"keep_every_steps": "often"}, "keep_every_"),
        ({"max_failed_saves": True}, "max_failed_saves"),
        ({"verify": False}, "full, quick"),
    ],
)
def test_wrong_settings_are_named(section, word):
    with pytest.raises(ConfigError, match=word):
        Settings.load(section, {})


@pytest.mark.parametrize(
    "section, variables, name",
    [
        ({"scrub": {"every_hours": 24}}, {}, r"mindresume\.scrub"),
        ({"scrub": None}, {}, r"mindresume\.scrub"),
        ({}, {"MINDRESUME_SCRUB_EVERY_HOURS": "24"}, "MINDRESUME_SCRUB_EVERY_HOURS"),
        (None, {"MINDRESUME_SCRUB_REPAIR": "0"}, "MINDRESUME_SCRUB_REPAIR"),
    ],
)
def test_a_setting_that_no_longer_exists_is_refused_with_what_to_do_instead(
    section, variables, name
):
    with pytest.raises(
        ConfigError,
        match=rf"{name} no longer exists.* mindresume scrub DIR .* cron or .*docs/scrub\.md",
    ):
        Settings.load(section, variables)


def test_notifications_are_an_option_of_the_supervisor():
    with pytest.raises(ConfigError, match="--notify-url"):
        Settings.load({"notify": {"url": "https://example.com"}}, {})


def test_a_fraction_is_not_rounded():
    with pytest.raises(ConfigError, match=r"max_failed_saves is 2\.5; expected a whole number"):
        Settings.load({"max_failed_saves": 2.5}, {})
    assert Settings.load({"max_failed_saves": 2.0, "staging_gib": 0.5}, {}).max_failed_saves == 2


@dataclass(frozen=True)
class _Inner:
    every_steps: int = 0
    mode: str = "a"


@dataclass(frozen=True)
class _Outer:
    inner: _Inner = _Inner()


def test_a_section_within_the_section():
    read = partial(_section, _Outer, "mindresume")
    assert read(None, {}) == _Outer()
    assert read({"inner": {"every_steps": 5}}, {}) == _Outer(_Inner(5))
    assert read({"inner": {"every_steps": 5}}, {"MINDRESUME_INNER_EVERY_STEPS": "7"}) == _Outer(
        _Inner(7)
    )
    with pytest.raises(ConfigError, match=r"mindresume.inner: unknown key 'every'"):
        read({"inner": {"every": 5}}, {})
    with pytest.raises(
        ConfigError,
        match=r"mindresume.inner is 5; expected a section with the keys every_steps, mode",
    ):
        read({"inner": 5}, {})
    with pytest.raises(ConfigError, match=r"mindresume.inner.every_steps is -1"):
        read({"inner": {"every_steps": -1}}, {})


def test_a_setting_that_is_true_or_false():
    read = partial(_section, MemoryTierSettings, "mindresume.memory_tier")
    for value in (True, "true", "True", 1, "1"):
        assert read({"partner": value}, {}).partner is True
    assert read({"partner": True}, {"MINDRESUME_MEMORY_TIER_PARTNER": "false"}).partner is False
    for wrong in ("yes", 2, None, [True]):
        with pytest.raises(ConfigError, match="partner is .*; expected true or false"):
            read({"partner": wrong}, {})


def test_a_number_within_limits():
    read = partial(_section, MemoryTierSettings, "mindresume.memory_tier")
    assert read({"partner_offset": 4, "partner_port": 65535}, {}).partner_offset == 4
    with pytest.raises(ConfigError, match="partner_offset is 0; expected .* at least 1$"):
        read({"partner_offset": 0}, {})
    with pytest.raises(ConfigError, match="partner_port is 65536; expected .* at most 65535$"):
        read({"partner_port": 65536}, {})


def test_a_list_or_text_of_patterns():
    assert Settings.load({"allow_missing": ["a*", "b"]}, {}).allow_missing == ("a*", "b")
    assert Settings.load({}, {"MINDRESUME_ALLOW_MISSING": "a*, b"}).allow_missing == ("a*", "b")
    for wrong in (3, [1], [""], {"a": 1}):
        with pytest.raises(ConfigError, match="expected a list of patterns"):
            Settings.load({"allow_missing": wrong}, {})

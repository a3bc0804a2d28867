import pytest

from mindresume.errors import ConfigError
from mindresume.settings import Settings


def test_defaults_section_and_environment():
    assert Settings.load(None, {}) == Settings()
    assert Settings.load({"on_save_error": "raise", "commit_timeout": 5}, {}).commit_timeout == 5.0
    assert Settings.load({"on_save_error": "raise"}, {"MINDRESUME_ON_SAVE_ERROR": "warn"}).on_save_error == "warn"
    assert Settings.load({}, {"MINDRESUME_MAX_FAILED_SAVES": "0"}).max_failed_saves == 0


@pytest.mark.parametrize("section, word", [
    ({"on_save_errors": "warn"}, "on_save_errors"), ({"on_save_error": "ignore"}, "warn, raise"),
    ({"commit_timeout": "soon"}, "commit_timeout"), ({"commit_timeout": -1}, "at least 0"),
    ({"max_failed_saves": True}, "max_failed_saves"), ({"verify": False}, "full, quick")])
def test_wrong_settings_are_named(section, word):
    with pytest.raises(ConfigError, match=word):
        Settings.load(section, {})

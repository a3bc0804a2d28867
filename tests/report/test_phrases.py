"""The texts in both languages: complete, with the same arguments, and used."""

import copy
import json
import re
from pathlib import Path

import pytest

import mindresume.report
from mindresume.report.phrases import (
    CHINESE,
    TEXTS,
    as_json,
    counted,
    in_language,
    joined,
    phrase,
)

ROOM = Path(mindresume.report.__file__).parent
SAME = {"epoch", "loss", "{key}: {steps}", "{first} + {second}", "{phase} {span}"}
PUNCTUATION = "，；：。（）"


def places(text):
    return set(re.findall(r"\{(\w+)\}", text))


def test_each_text_has_a_translation_with_the_same_arguments():
    for key, (english, chinese) in TEXTS.items():
        assert english and chinese and places(english) == places(chinese), key
        assert english.count("|") <= 1 and "|" not in chinese, key
        is_chinese = re.search(f"[\u4e00-\u9fff{PUNCTUATION}]", chinese) or key == "join.sentence"
        assert english in SAME if english == chinese else is_chinese, key


def test_the_english_text_has_no_chinese_and_no_hidden_character():
    for english, chinese in TEXTS.values():
        assert not re.search("[\u3000-\u9fff\uff00-\uffef]", english), english
        text = (english + chinese).replace("\n", "")
        assert text.isprintable(), text


def test_each_text_is_used():
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in ROOM.iterdir()
        if path.suffix in (".py", ".js", ".html") and path.name != "texts.json"
    )
    prefixes = set(re.findall(r'f"([a-z_.]+)\{|"([a-z_]+\.)"', source))
    begins = tuple(one or other for one, other in prefixes)
    assert not [key for key in TEXTS if f'"{key}"' not in source and not key.startswith(begins)]


def test_a_phrase_is_its_english_text():
    found = phrase("tile.lost.more", share="3 %")
    assert found == "3 % of the steps done" and json.dumps([found])
    assert in_language(found, CHINESE) == "占已执行步数的 3 %"
    assert copy.deepcopy(found).arguments == found.arguments
    with pytest.raises(KeyError):
        phrase("tile.lost.more")


def test_forms_and_phrases_in_phrases():
    assert [counted("step", count) for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    found = phrase("tile.reached.more", steps=counted("step", 1))
    assert found == "1 step done for it" and in_language(found, CHINESE) == "共执行 1 步"
    assert as_json(found) == ["tile.reached.more", {"steps": ["count.step", {"count": 1}]}]


def test_what_looks_like_a_place_in_an_argument_is_kept():
    assert (
        phrase("failed_save", reason="{reason} {x} \\1 $& |")
        == "failed save: {reason} {x} \\1 $& |"
    )


def test_joined():
    assert (joined([]), joined(["a"])) == ("", "a")
    found = joined(["a", counted("step", 2), "c"])
    assert found == "a, 2 steps, c" and in_language(found, CHINESE) == "a，2 步，c"
    assert joined(["A.", "", None, "B."], "sentence") == "A. B."

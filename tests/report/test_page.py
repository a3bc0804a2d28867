"""The page: well-formed, alone, nothing of a log gets out of its place."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rank_folders import STORAGE, save
from training_logs import RUNS, Training, history, two_attempts

from mindresume import events as ev
from mindresume.formatting import shown
from mindresume.report import page, tables
from mindresume.report.advice import advice_of, sentence_of
from mindresume.report.builder import build_report
from mindresume.report.phrases import TEXTS, as_json, phrase
from mindresume.report.runs import KILLED

VOID = {"meta", "br"}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--</title>"
BASE = "default-src 'none'; script-src '{}'; style-src '{}'; base-uri 'none'; form-action 'none'"


class Checker(HTMLParser):
    """Checks that tags are closed in order; collects attributes that load something, and the text
    of tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.attributes, self.rows = [], []
        self.scripts, self.styles = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inner = self.open[-1] if self.open else ""
        if inner == "script":
            self.scripts[-1][1] += data
        elif inner == "style":
            self.styles.append(data)
        elif {"td", "th"} & set(self.open) and inner != "title":
            self.rows[-1][-1] += data


def data_of(text):
    """Returns the data block of a page."""
    (_, block), _ = Checker(text).scripts
    return json.loads(block)


def hash_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def written(folder, log):
    log.write_all(folder)
    return build_report(STORAGE, str(folder), str(folder / "checkpoint"))


def test_a_row_for_each_attempt_and_each_checkpoint(tmp_path):
    save(tmp_path / "checkpoint", 5)
    save(tmp_path / "checkpoint", 10)
    text = page.html(written(tmp_path, two_attempts()))
    rows = Checker(text).rows
    assert [row[:1] + row[3:8] for row in rows if len(row) == 9 and row[1] in RUNS[:2]][:2] == [
        ["1", "failed" + KILLED, "fresh start", "1 to 8", "3", "1"],
        ["2", "finished", "step 5", "6 to 10", "0", "1"],
    ]
    assert [row[0] for row in rows if row[-1] == "complete"] == ["10", "5"]
    assert text.count("<caption>") == text.count("<table>") == 6 and "3 of 13" in text
    for row in (
        ["2", "8", "the save never completed: no rank recorded what it wrote"],
        ["1", "2", "disk", "30 s", "3 steps", ""],
        ["Total", "", "", "30 s", "3 steps", ""],
        ["", "Total", "34 s", "100 %", ""],
    ):
        assert row in rows


def test_the_page_says_what_the_advice_would_change(tmp_path):
    report = written(tmp_path, history(attempts=4, memory=3, sources="mmd", every=50))
    text = page.html(report)
    assert sentence_of(advice_of(report)) in text and "; 36 in memory" in text
    rows = Checker(text).rows
    assert [row[2] for row in rows if row[0].isdigit() and row[2] in ("memory", "disk")] == [
        *("memory", "memory", "disk")
    ]
    assert "step 108 in memory" in sum(rows, [])
    assert tables.recovery_summary(report).startswith("3 recoveries: 2 from memory")


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path):
    checker = Checker(page.html(written(tmp_path, two_attempts())))
    loading = {"link", "iframe", "img", "object", "base", "form", "image", "foreignObject"}
    assert not loading & set(checker.tags)
    names = {name for name, _ in checker.attributes}
    assert not names & {"src", "href", "style", "srcdoc"}
    assert not [name for name in names if name.startswith("on")]
    (block, _), script = checker.scripts
    assert block == {"type": "application/json", "id": "data"}
    assert (script, checker.styles) == ([{}, page.SCRIPT], [page.STYLE])
    (policy,) = [text for name, text in checker.attributes if "default-src" in (text or "")]
    assert policy.startswith(BASE.format(hash_of(page.SCRIPT), hash_of(page.STYLE)))
    assert policy.endswith("require-trusted-types-for 'script'; trusted-types 'none'")


def test_the_script_writes_no_markup_and_asks_no_network():
    script = page.SCRIPT
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "setTimeout",
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "sendBeacon",
        "import(",
        "http:",
        "https:",
        "</script",
        "<!--",
        "localStorage",
    ):
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word
    style = page.STYLE.replace("url(#hatch)", "")
    assert not [word for word in ("</style", "url(", "@import", "expression") if word in style]
    for name in page.SCRIPTS:
        lines = (page.FOLDER / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) < 400 and max(map(len, lines)) <= 130


def test_hostile_text_is_escaped(tmp_path):
    log = Training().start(0).event(1, ev.CandidateRefused(5, EVIL, EVIL)).resume(2, 0, EVIL)
    log.run(3, EVIL).steps(4, 1, 3).event(8, ev.SaveFailed(3, EVIL))
    text = page.html(written(tmp_path, log.event(9, ev.TrainingEnded(ev.FAILED, EVIL))))
    checker = Checker(text)
    assert checker.tags.count("script") == 2 and "img" not in checker.tags
    cells = [cell for row in checker.rows for cell in row if "alert(1)" in cell]
    assert len(cells) == 4 and all(EVIL in cell for cell in cells)
    assert not [name for name, _ in checker.attributes if name.startswith("on")]
    (_, block), _ = checker.scripts
    assert not set("<>&") & set(block)
    (failed,) = [mark for mark in data_of(text)["chart"]["marks"] if mark["kind"] == "failed"]
    assert EVIL in failed["text"][1]["reason"]
    phrases = [json.loads(value) for name, value in checker.attributes if name == "data-t"]
    assert ["failed_save", {"reason": EVIL}] in phrases


@pytest.mark.parametrize(
    "text", ["</script>", "<!--<script>", "a\u2028b\u2029c", "\x1b[2J\u202e", "\udc80", "&lt;"]
)
def test_nothing_gets_out_of_the_data_block(text):
    block = page.json_block({text: [text, {"x": (text,)}]})
    assert not set("<>&\u2028\u2029\x1b\u202e") & set(block) and block.encode()
    assert json.loads(block) == {text: [text, {"x": [text]}]}
    assert as_json(phrase("failed_save", reason=text)) == [
        "failed_save",
        {"reason": shown(text, keep="\n")},
    ]


def test_a_hostile_name_of_a_folder_is_text(tmp_path):
    folder = tmp_path / "a<script>b"
    Checker(text := page.html(written(folder, two_attempts())))
    assert (
        text.count("<script") == 2
        and f"Training report: {tmp_path}/a&lt;script&gt;b</title>" in text
    )


def test_each_phrase_of_the_page_has_its_texts(tmp_path):
    text = page.html(written(tmp_path, two_attempts()))
    keys = [json.loads(value)[0] for name, value in Checker(text).attributes if name == "data-t"]
    assert keys[0] == "title.of" and len(keys) > 90 and set(keys) <= TEXTS.keys()
    texts = data_of(text)["texts"]
    assert texts["zh"].keys() == texts["en"].keys() == TEXTS.keys()


def test_the_template_has_no_text_of_its_own():
    template = (Path(page.__file__).parent / page.TEMPLATE).read_text(encoding="utf-8")
    alone = re.sub(r"{[{%].*?[%}]}", "", template, flags=re.DOTALL)
    words = re.sub(r"<[^>]*>", "", alone)
    assert not re.search("[A-Za-z]", words), words


def test_without_anything(tmp_path):
    text = page.html(build_report(STORAGE, str(tmp_path), str(tmp_path / "checkpoint")))
    Checker(text)
    assert "There is no folder" in text


def test_hidden_characters_are_shown(tmp_path):
    text = page.html(written(tmp_path, Training().start(0).run(1, "\x1b[2Jred\u202e")))
    assert "\\x1b[2Jred\\u202e" in text and "\x1b" not in text and "\u202e" not in text


def test_unknown_values_are_marked(tmp_path):
    two_attempts().write(tmp_path / "log" / "rank_0" / "info.log")
    report = build_report(STORAGE, str(tmp_path), str(tmp_path / "checkpoint"))
    _, first, second = (row for row in Checker(page.html(report)).rows if len(row) == 9)
    assert first[1] == first[7] == "not known" and "inferred" in second[4]


def test_the_summary_is_one_sentence(tmp_path):
    assert tables.summary(written(tmp_path, two_attempts())) == (
        "2 run attempts, 1 failure; step 10 reached, 3 of 13 steps lost; 55 s, goodput 18 %"
    )


@pytest.mark.parametrize(
    "seconds, text",
    [
        (-1, "0.00 s"),
        (0.321, "0.32 s"),
        (4.04, "4.0 s"),
        (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (86400 * 2 + 4 * 3600, "2 d 4 h"),
    ],
)
def test_spans(seconds, text):
    assert page.duration(seconds) == text


def test_percent():
    parts = ((0, 0, "0 %"), (1, 3, "33 %"), (1, 40, "2.5 %"), (5, 5, "100 %"), (1, 5000, "< 0.1 %"))
    for part, whole, text in parts:
        assert tables.percent(part, whole) == text

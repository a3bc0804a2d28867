"""The report page in a real browser (headless Chromium), opened from a file: values, zoom,
languages, colours, hostile texts, and the page without scripts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mindresume.api.results import CheckpointInfo, Problem
from mindresume.events import TierSaved
from mindresume.report import page
from mindresume.report.accounting import accounts_of
from mindresume.report.builder import Report
from mindresume.report.phrases import CHINESE, ENGLISH, TEXTS
from mindresume.report.runs import (
    KILLED,
    Losses,
    Origin,
    RefusedCheckpoint,
    RunAttempt,
    Save,
    Saves,
)
from st.browser import Browser, missing

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(missing()), reason=missing())]
EVIL = (
    "<script>document.title = 'x'</script></script><img src=x onerror=\"document.title='y'\"><!--"
)
DATA = (
    "mindformers",
    "mindresume",
    "goodput",
    "loss",
    "checkpoint",
    "run",
    "epoch",
    "rank",
    "min",
    "ms",
    "KiB",
    "MiB",
    "safetensors",
)
# What is the same in both languages: names of settings, commands and files.
NAMES = (
    "JSON",
    "json",
    "report",
    "verify",
    "every_steps",
    "save_checkpoint_steps",
    "memory_tier",
    "callbacks",
    "CheckpointMonitor",
    "English",
    "MindSpore",
    "Page",
    "Down",
    "Shift",
    "Esc",
    "Up",
)


def attempt(
    number: int,
    first: int,
    last: int,
    started: float,
    copies: tuple[TierSaved, ...] = (),
    **more: object,
) -> RunAttempt:
    """Returns an attempt with a step each second and a save every tenth step."""
    steps = np.arange(first, last + 1)
    losses = Losses(
        steps,
        6 - steps / 50 + 0.1 * np.sin(steps),
        started + 10 + np.arange(len(steps)),
        np.ones(len(steps)),
    )
    saves = tuple(
        Save(step, started + 10 + step - first, 0.1, 0.2, 13_000_000, True)
        for step in range(first, last + 1)
        if step % 10 == 0
    )
    return RunAttempt(
        number,
        started,
        started + 12 + len(steps),
        **{
            "outcome": "failed",
            "run_id": f"000{number}-0000aaaa",
            "last_step": last,
            "losses": losses,
            "saves": Saves(saves, copies),
            **more,
            # what the first step follows from
            "origin": replace(more.get("origin", Origin()), base_step=first - 1),
        },
    )


def report_of(
    *attempts: RunAttempt, reason: str = "file is missing", output: str = "/home/me/output"
) -> Report:
    newest = CheckpointInfo(
        120,
        12,
        "complete",
        None,
        (),
        "safetensors",
        None,
        "mindresume",
        "0003-0000aaaa",
        True,
        1,
        (),
        (),
        1e9,
        13_000_000,
        (),
    )
    unusable = replace(
        newest,
        step=110,
        epoch=11,
        state="unusable",
        problem=Problem(110, reason),
        origin="mindformers",
        run_id=None,
        committed=False,
    )
    return Report(
        output,
        (output,),
        (f"{output}/log/rank_0/info.log",),
        0,
        None,
        accounts_of(attempts),
        f"{output}/checkpoint",
        True,
        (newest, unusable),
        (),
    )


def usual() -> Report:
    return report_of(
        attempt(1, 1, 37, 1e9, origin=Origin(is_fresh=True), reason=KILLED),
        attempt(
            2,
            31,
            78,
            1e9 + 80,
            reason="RuntimeError: out of memory",
            failed_rank=0,
            copies=(TierSaved(35, 13_000_000, 0.05, 0.1),),
            origin=Origin(
                step=30,
                run_id="0001-0000aaaa",
                source="disk",
                base_step=30,
                load_seconds=1.5,
                refused=(RefusedCheckpoint(35, "3 bytes are damaged"),),
            ),
        ),
        attempt(
            3,
            71,
            120,
            1e9 + 180,
            origin=Origin(step=70, run_id="0002-0000aaaa", source="memory", base_step=70),
            outcome="finished",
        ),
    )


def hostile() -> Report:
    saves = (Save(20, 1e9 + 25, failure=EVIL), Save(30, 1e9 + 35, 0.1, 0.2, 10**6, True))
    return report_of(
        attempt(
            1,
            1,
            37,
            1e9,
            run_id=EVIL,
            reason=EVIL,
            saves=Saves(saves),
            origin=Origin(checkpoint=EVIL, refused=(RefusedCheckpoint(5, EVIL),)),
        ),
        attempt(
            2,
            31,
            60,
            1e9 + 80,
            origin=Origin(step=30, run_id=EVIL, source=EVIL, base_step=30),
            outcome=EVIL,
        ),
        reason=EVIL,
        output=f"/home/{EVIL}",
    )


def long() -> Report:
    count = 200_000
    steps = np.arange(1, count + 1)
    values = 2 + np.sin(steps / 5000)
    values[77_776] = 9.0
    return report_of(
        RunAttempt(
            1,
            0.0,
            count + 5.0,
            "finished",
            run_id="0001-0000aaaa",
            origin=Origin(is_fresh=True),
            last_step=count,
            losses=Losses(steps, values, steps + 1.0, np.ones(count)),
        )
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for make in (usual, hostile, long):
        report = make()
        path = folder / f"{make.__name__}.html"
        path.write_text(page.html(report), encoding="utf-8")
        found[make.__name__] = path
    return SimpleNamespace(**found)


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def opened(browser, pages) -> Browser:
    browser.open(pages.usual)
    return browser


def data_of(path: Path) -> dict:
    return json.loads(
        re.search(
            r'<script type="application/json" id="data">(.*?)</script>',
            path.read_text(encoding="utf-8"),
        )[1]
    )


def view(browser: Browser, name: str = "loss") -> tuple[float, float]:
    found = browser.plot(name)
    return found["from"], found["to"]


def ticks(browser: Browser, name: str = "loss") -> list[str]:
    return browser.run(
        "return [...document.querySelectorAll(`#plot-${arguments[0]} .tick`)].map((one) => "
        "one.textContent)",
        name,
    )


def click(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).click()", selector)


def texts_of(browser: Browser) -> list[str]:
    """Returns every text that can be read on the page, attributes for readers included."""
    return browser.run("""const found = [document.title];
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT, (node) =>
            node.parentElement.closest("script, [hidden]") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
        while (walker.nextNode()) found.push(walker.currentNode.data);
        for (const one of document.querySelectorAll("[title], [aria-label]")) {
            found.push(one.getAttribute("title") || "", one.getAttribute("aria-label") || "");
        }
        return found.filter((text) => text.trim())""")  # noqa: E501


# ---- the page ------------------------------------------------------------------------------------


def test_nothing_is_requested_and_nothing_is_refused(browser, pages):
    for path in (pages.usual, pages.hostile, pages.long):
        browser.open(path)
        browser.requested()
        browser.driver.refresh()
        browser.point_at("loss", 35)
        assert set(browser.requested()) == {path.resolve().as_uri()} and browser.logged() == []
        assert browser.run(
            'return ["no-charts", "charts"].map((id) => document.getElementById(id).hidden)'
        ) == [True, False]


def test_markup_that_got_into_the_page_does_not_run(browser, pages, tmp_path):
    text, path = pages.usual.read_text(encoding="utf-8"), tmp_path / "broken.html"
    added = (
        "<script>document.title = 'injected'</script><img src='x.png' onerror=\"document.title = "
        "'injected'\">"
        "<style>h1 { color: rgb(1, 2, 3) }</style><p style='color: rgb(1, 2, 3)'>a</p>"
        "<script src='x.js'></script><iframe src='javascript:parent.document.title=1'></iframe>"
    )
    path.write_text(text.replace("<h1>", added + "<h1>", 1), encoding="utf-8")
    browser.open(path)
    assert "step 35: loss" in browser.point_at("loss", 35) and browser.run(
        "return document.title"
    ).startswith("Training report")
    colours = browser.run(
        'return ["h1", "p[style]"].map((one) => '
        "getComputedStyle(document.querySelector(one)).color)"
    )
    assert "rgb(1, 2, 3)" not in colours and len(browser.logged()) >= 5


def test_what_a_script_adds_to_the_page_does_not_run(opened):
    opened.run("""const tries = [
        () => { const made = document.createElement("script"); document.body.append(made);
                made.append("document.title = 'injected'"); },
        () => document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\\"document.title='injected'\\">"),
        () => { document.body.setAttribute("onclick", "document.title = 'injected'"); document.body.click(); }];
        for (const one of tries) { try { one(); } catch (error) { } }""")  # noqa: E501
    assert opened.run("return document.title") == "Training report: /home/me/output"
    assert opened.run("return document.images.length") == 0
    opened.logged()


def test_hostile_texts_stay_texts(browser, pages):
    for language in ("en-US", "zh-CN"):
        browser.open(pages.hostile, language)
        title = browser.run("return document.title")
        assert title.endswith(f"/home/{EVIL}") and browser.run("return document.images.length") == 0
        assert browser.run('return document.querySelectorAll("script").length') == 2
        assert (
            EVIL in browser.point_at("loss", 37) and browser.run("return document.title") == title
        )
        assert sum(EVIL in text for text in texts_of(browser)) > 8 and browser.logged() == []


def test_without_scripts_there_are_tables(pages):
    browser = Browser(script=False)
    try:
        browser.command("Emulation.setScriptExecutionDisabled", value=True)
        browser.driver.get(pages.usual.resolve().as_uri())
        root = browser.command("DOM.getDocument", depth=-1)["root"]["nodeId"]

        def count(selector: str) -> int:
            return len(
                browser.command("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
            )

        assert count("#no-charts:not([hidden])") == 1 and count("table") == 6
        assert (
            count("#charts[hidden]:empty") == count("#switches[hidden]:empty") == 1
            and count(".tip") == 0
        )
        assert browser.logged() == []
    finally:
        browser.close()


# ---- values --------------------------------------------------------------------------------------


def test_pointing_shows_the_value_of_the_data(opened, pages):
    curves = data_of(pages.usual)["chart"]["curves"]
    for curve in curves:
        index = len(curve["steps"]) // 2
        text = opened.point_at("loss", curve["steps"][index])
        assert (
            f"step {curve['steps'][index]}: loss {curve['values'][index]}" in text
            and f"attempt {curve['attempt']}," in text
        )


def test_pointing_at_marks(opened):
    text = opened.point_at("loss", 20, 0.98)
    assert "step 20 saved at " in text and "12.4 MiB; training stopped for 0.10 s" in text
    text = opened.point_at("loss", 37)
    assert (
        "attempt 1 failed at step 37" in text and "no end was recorded" in text and "lost" in text
    )
    assert "rank 0: RuntimeError: out of memory" in opened.point_at("loss", 78)
    text = opened.point_at("loss", 70)
    assert "attempt 3 resumed after step 70" in text and "from memory" in text
    assert "saved to memory by attempt 2" in opened.point_at("loss", 35, 0.94)


def test_pointing_at_the_timeline(opened, pages):
    chart_data = data_of(pages.usual)["chart"]
    kind, number, begin, end = max(chart_data["spans"], key=lambda span: span[3] - span[2])
    text = opened.point_at("timeline", begin + (end - begin) * 0.37, 0.4)
    assert (
        text.startswith(f"{TEXTS[f'spent.{kind}'][ENGLISH]}: {round(end - begin)} s")
        and f"attempt {number}," in text
    )
    phase = chart_data["phases"][0]
    assert "recovery after attempt 1" in opened.point_at(
        "timeline", (phase[2] + phase[3]) / 2, 0.82
    )


def test_the_phases_of_a_recovery_have_values(opened):
    rows = opened.run(
        'return [...document.querySelectorAll("svg.parts")].map((bar) => bar.children.length)'
    )
    assert len(rows) == 2 and min(rows) >= 2
    opened.scroll_to("svg.parts rect")
    box = opened.run("""const box = document.querySelector("svg.parts rect").getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2]""")  # noqa: E501
    opened.mouse("Moved", tuple(box))
    assert re.fullmatch(r"notice \+ .*: \d+ s", opened.tip())
    opened.mouse("Moved", (5, 5))
    assert opened.tip() == ""
    assert (
        opened.run('return document.querySelector("svg.parts").getAttribute("aria-label")').count(
            ";"
        )
        == rows[0] - 1
    )


def test_the_keyboard_shows_values(opened):
    opened.run('document.getElementById("plot-loss").focus()')
    opened.press("ArrowRight")
    assert opened.tip().startswith("step 1: loss ")
    opened.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert opened.tip().startswith("step 2: loss ")
    opened.press("PageDown")
    assert "step 10 saved" in opened.tip()
    opened.press("+")
    begin, end = view(opened)
    assert end - begin < 70
    opened.press("Escape")
    assert view(opened)[1] - view(opened)[0] > 119


def test_a_finger_shows_values_and_does_not_zoom(opened):
    before, (x, y) = view(opened), opened.place("loss", 50)
    opened.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    opened.command(
        "Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x + 40, "y": y}]
    )
    assert "loss" in opened.tip() and view(opened) == before
    opened.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


# ---- zoom, series --------------------------------------------------------------------------------


def test_dragging_zooms_and_a_double_click_shows_all(opened):
    whole, labels = view(opened), ticks(opened)
    opened.drag("loss", 40, 60)
    begin, end = view(opened)
    assert begin == pytest.approx(40, abs=0.5) and end == pytest.approx(60, abs=0.5)
    assert ticks(opened) != labels and all(40 <= float(tick) <= 60 for tick in ticks(opened))
    assert opened.point_at("loss", 50).startswith("step 50")
    place = opened.place("loss", 50)
    for count in (1, 2):
        for kind in ("Pressed", "Released"):
            opened.mouse(kind, place, clickCount=count)
    assert view(opened) == whole and ticks(opened) == labels


def test_buttons_zoom_and_move(opened):
    whole = view(opened)
    click(opened, "[data-tool=zoom_in]")
    first = view(opened)
    assert first[1] - first[0] == pytest.approx((whole[1] - whole[0]) / 2)
    click(opened, "[data-tool=right]")
    moved = view(opened)
    assert moved[0] > first[0] and moved[1] - moved[0] == pytest.approx(first[1] - first[0])
    for _ in range(9):
        click(opened, "[data-tool=right]")
    assert view(opened)[1] == pytest.approx(whole[1])
    click(opened, "[data-tool=zoom_out]")
    click(opened, "[data-tool=all]")
    assert view(opened) == whole
    for _ in range(20):
        click(opened, "[data-tool=zoom_in]")
    assert view(opened)[1] - view(opened)[0] == pytest.approx(2) and all(
        float(tick).is_integer() for tick in ticks(opened)
    )


def test_dragging_with_shift_moves(opened):
    opened.drag("loss", 40, 60)
    begin, end = view(opened)
    opened.drag("loss", 50, 45, modifiers=8)
    assert view(opened) == (pytest.approx(begin + 5, abs=0.5), pytest.approx(end + 5, abs=0.5))


def test_the_legend_switches_series_off_and_on(opened):
    marks = 'return document.querySelectorAll("#plot-loss .inside .mark.committed").length'
    areas = 'return document.querySelectorAll("#plot-loss .area").length'
    assert opened.run(marks) == 12 and opened.run(areas) == 2
    click(opened, "[data-series=committed]")
    click(opened, "[data-series=lost]")
    assert opened.run(marks) == 0 and opened.run(areas) == 0
    assert "lost" not in opened.point_at("loss", 35)
    assert (
        opened.run(
            'return document.querySelector("[data-series=lost]").getAttribute("aria-pressed")'
        )
        == "false"
    )
    click(opened, "[data-series=committed]")
    assert opened.run(marks) == 12


def test_a_long_training_says_what_was_left_out_and_keeps_its_peak(browser, pages):
    browser.open(pages.long)
    losses = data_of(pages.long)["chart"]["losses"]
    note = browser.run('return document.querySelector("[data-note=left_out]").textContent')
    assert (
        losses["shown"] < losses["total"] == 200_000 and f"{losses['shown']:,} of 200,000" in note
    )
    browser.drag("loss", 70_000, 90_000)
    assert "step 77777: loss 9\n" in browser.point_at("loss", 77_777, 0.05)
    assert pages.long.stat().st_size < 1_000_000


def test_between_two_points_that_are_left_the_axis_has_their_losses(browser, pages):
    browser.open(pages.long)
    (curve,) = data_of(pages.long)["chart"]["curves"]
    index = max(
        range(3000, 3200), key=lambda index: curve["steps"][index + 1] - curve["steps"][index]
    )
    begin, end = curve["steps"][index : index + 2]
    browser.drag("loss", begin - 2000, end + 2000)
    browser.drag("loss", begin + 6, end - 6)
    ends = view(browser)
    assert begin < ends[0] < ends[1] < end
    drawn = browser.run(
        'return [...document.querySelectorAll("#plot-loss .tick-y")].map((one) => +one.textContent)'
    )
    assert max(abs(tick - curve["values"][index]) for tick in drawn) < 0.5


# ---- languages, colours --------------------------------------------------------------------------


def english_left(texts: list[str], data: tuple[str, ...]) -> set[str]:
    """Returns the English words in texts that are neither names nor data."""
    for row in sorted(data, key=len, reverse=True):
        texts = [text.replace(row, " ") for text in texts]
    words = {word for text in texts for word in re.findall(r"[A-Za-z_]{2,}", text)}
    return {word for word in words if word not in (*DATA, *NAMES)}


LOGGED = (
    "/home/me/output",
    "/log/rank_0/info.log",
    "RuntimeError: out of memory",
    "3 bytes are damaged",
    "file is missing",
    "0001-0000aaaa",
    "0002-0000aaaa",
    "0003-0000aaaa",
    "GiB/s",
)


def test_the_switch_changes_every_fixed_text(opened):
    before = texts_of(opened)
    assert not re.search("[\u4e00-\u9fff]", "".join(before).replace("中文", ""))
    click(opened, "button[lang=zh]")
    after = texts_of(opened)
    assert (
        english_left(after, LOGGED) == set()
        and opened.run("return document.documentElement.lang") == "zh-CN"
    )
    assert (
        "RuntimeError: out of memory" in "".join(after) and after[0] == "训练报告：/home/me/output"
    )
    for place, height in ((37, 0.5), (20, 0.98), (70, 0.5), (35, 0.94)):
        assert english_left([opened.point_at("loss", place, height)], LOGGED) == set()
    assert (
        english_left(
            [opened.point_at("timeline", 100, 0.4), opened.point_at("timeline", 60, 0.82)], LOGGED
        )
        == set()
    )
    click(opened, "button[lang=en]")
    opened.mouse("Moved", (2, 2))
    assert texts_of(opened) == before


def test_the_language_of_the_browser_decides_first_and_the_choice_is_remembered(browser, pages):
    browser.open(pages.usual, "zh-CN")
    heading = 'return document.querySelector("h1").textContent'
    assert browser.run(heading) == TEXTS["title"][CHINESE]
    click(browser, "button[lang=en]")
    browser.driver.refresh()
    assert (
        browser.run(heading) == TEXTS["title"][ENGLISH]
        and browser.run("return localStorage.length") == 0
    )
    browser.open(pages.usual, "de-DE")
    assert browser.run(heading) == TEXTS["title"][ENGLISH]


CONTRAST = """const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const light = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255)
            .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = (one) => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
        if (!/, 0\\)$|transparent/.test(colour)) return colour; } return "white"; };
    const found = [];
    for (const one of document.querySelectorAll("h1, h2, h3, p, td, th, dt, dd, caption, button, td span, .plot text, .tip")) {
        if (one.closest("[hidden]") || !one.textContent.trim()) continue;
        const style = getComputedStyle(one);
        const colours = [one.namespaceURI.endsWith("svg") ? style.fill : style.color, behind(one)];
        const [a, b] = colours.map(light).sort((x, y) => y - x);
        found.push([(a + 0.05) / (b + 0.05), `${one.tagName}.${one.getAttribute("class")}: ${one.textContent.slice(0, 30)}`]);
    }
    return found"""  # noqa: E501


@pytest.mark.parametrize("dark", [False, True])
def test_the_text_is_readable_in_light_and_dark(browser, pages, dark):
    browser.open(pages.usual, dark=dark)
    browser.point_at("loss", 37)
    found = browser.run(CONTRAST)
    assert len(found) > 100 and [row for row in found if row[0] < 4.5] == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (not dark)
    click(browser, "#colours")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != background
    browser.driver.refresh()
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != background


def test_a_narrow_window_does_not_scroll_sideways(browser, pages):
    browser.open(pages.usual, width=400, height=800)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert "loss" in browser.point_at("loss", 50)
    box = browser.run(
        'const box = document.querySelector(".tip").getBoundingClientRect(); return [box.left, '
        "box.right]"
    )
    assert box[0] >= 0 and box[1] <= 400

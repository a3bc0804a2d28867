"""The guide builds without a warning in both languages; its links are right, and no page loads
anything from a network."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mindresume
from mindresume import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NEEDED = ("mkdocs", "material", "mkdocs_static_i18n", "mkdocstrings", "mkdocstrings_handlers")
MISSING = [name for name in NEEDED if find_spec(name) is None]
NOT_PAGES = {"status.md", "upstream_issues.md"}
LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
    ("video", "poster"),
    ("audio", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("input", "src"),
    ("image", "href"),
    ("use", "href"),
}
LINKS_THAT_LOAD = {
    "stylesheet",
    "icon",
    "preload",
    "modulepreload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
NETWORK = re.compile(r"^\s*(?:https?:)?//")
IN_STYLES = re.compile(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"';)]*)""")


class Page(HTMLParser):
    """Collects from a page its anchors, its links, what a browser loads, and its language."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.language = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.loads += [values[key] for kind, key in LOADS if kind == tag and key in values]
        if tag == "html":
            self.language = values.get("lang", "")
        if tag == "link" and LINKS_THAT_LOAD & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "mermaid" in values.get("class", "").split():
            # the theme loads it for such an element
            self.loads.append("https://unpkg.com/mermaid")
        self.loads += IN_STYLES.findall(values.get("style", ""))


def pages() -> list[str]:
    """Returns the names of the pages without .md."""
    return sorted(
        path.stem
        for path in DOCS.glob("*.md")
        if not path.name.endswith(".zh.md") and path.name not in NOT_PAGES
    )


def broken_links(site: Path, found: dict[Path, Page]) -> list[str]:
    """Returns the links whose file or anchor does not exist, and the missing images, styles and
    scripts."""
    broken = []
    for path, page in found.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or (
                target in found and unquote(parts.fragment) not in found[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def network_loads(site: Path, found: dict[Path, Page]) -> list[str]:
    """Returns what a browser would load from a network."""
    loads = [
        f"{path.relative_to(site)}: {load}"
        for path, page in found.items()
        for load in page.loads
        if NETWORK.match(load)
    ]
    styles = [
        path for path in site.rglob("*.css") if IN_STYLES.search(path.read_text(encoding="utf-8"))
    ]
    inline = [
        path
        for path in found
        for style in re.findall(
            r"<style[^>]*>(.*?)</style>", path.read_text(encoding="utf-8"), re.S
        )
        if IN_STYLES.search(style)
    ]
    return loads + [str(path.relative_to(site)) for path in (*styles, *inline)]


@pytest.mark.skipif(
    bool(MISSING),
    reason=f"the guide is not built: {', '.join(MISSING)} is not installed (mkdocs-material, "
    f"mkdocs-static-i18n, mkdocstrings-python)",
)
def test_the_guide_builds_in_both_languages_without_warnings_and_without_a_network(tmp_path):
    site = (tmp_path / "site").resolve()
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            ROOT / "mkdocs.yml",
            "--site-dir",
            site,
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    output = done.stdout + done.stderr
    assert [
        line for line in output.splitlines() if re.search(r"\b(WARNING|ERROR|CRITICAL)\b", line)
    ] == []
    assert done.returncode == 0, output

    found = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    assert {path.stem for path in found if path.parent == site} == set(pages())
    assert {path.stem for path in found if path.parent == site / "zh"} == set(pages())
    assert {page.language for path, page in found.items() if path.parent == site / "zh"} == {"zh"}
    assert broken_links(site, found) == []
    anchors = found[site / "api_reference.html"].anchors
    assert {f"mindresume.errors.{name}" for name in vars(errors) if name[-5:] == "Error"} <= (
        anchors | {"mindresume.errors.MindResumeError"}  # that of mindresume.MindResumeError
    )
    assert network_loads(site, found) == []
    escaped = {
        path.name: re.findall(
            r"<td>(?:(?!</td>).)*<code>[^<]*\\\|[^<]*</code>", path.read_text(encoding="utf-8")
        )
        for path in found
    }
    assert {name: cells for name, cells in escaped.items() if cells} == {}, (
        "a bar in code in a table: <code>a&#124;b</code>"
    )

    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {row["location"].partition("#")[0] for row in index["docs"]}
    assert (
        index["config"]["lang"] == ["en", "zh"] and {"settings.html", "zh/settings.html"} <= places
    )
    assert (site / "assets/javascripts/lunr/min/lunr.zh.min.js").is_file()
    # what the search reads when the site is opened as files
    of_files = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert json.loads(of_files.removeprefix("var __index = ")) == index
    assert "../javascripts/iframe-worker.js" in found[site / "zh" / "index.html"].loads


@pytest.mark.parametrize("name", ["api_reference.md", "api_reference.zh.md"])
def test_every_public_name_has_an_entry(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    entries = re.findall(r"^::: ([\w.]+)$", text, re.M)
    for members in re.findall(r"^      members: \[(.*)\]$", text, re.M):
        entries += [f"mindresume.{member}" for member in members.split(", ")]
    assert {f"mindresume.{key}" for key in mindresume.__all__} | {
        "mindresume.errors",
        "mindresume.plugin.report_metric",
    } <= set(entries)
    assert len(entries) == len(set(entries))


def test_a_broken_link_is_found(tmp_path):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    first.write_text(
        '<p id="here"><a href="#here"></a><a href="b.html#配置"></a><a href="b.html#x"></a><a '
        'href="c.html"></a>',
        "utf-8",
    )
    second.write_text(
        '<img src="c.svg"><img src="data:,x">'
        '<h2 id="配置"></h2><a href="a.html#%E4%B8"></a><a href="https://x.org/#y"></a>',
        "utf-8",
    )
    found = {path: Page(path.read_text(encoding="utf-8")) for path in (first, second)}
    assert broken_links(tmp_path, found) == [
        "a.html: b.html#x",
        "a.html: c.html",
        "b.html: a.html#%E4%B8",
        "b.html: c.svg",
    ]

"""Checks that what README.md and docs/ name exists: modules, classes, functions, targets of links
and their anchors; and that a Chinese page has what the English one has."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mindresume.settings import Settings

ROOT = Path(__file__).parents[1]
ROOMS = [
    ROOT,
    ROOT / "mindresume",
    ROOT / "sim",
    *(path for path in (ROOT / "mindresume").iterdir() if path.is_dir()),
]
FILES = {
    path: set(re.findall(r"\w+", path.read_text()))
    for path in [*(ROOT / "mindresume").rglob("*.py"), *(ROOT / "sim").glob("*.py")]
}  # the words of each
WORDS = set().union(*FILES.values())
WORDS |= set(
    re.findall(r"\w+", (ROOT / "mindresume" / "mindformers" / "upstream.json").read_text("utf-8"))
)
# monitoring.md names its alerts
WORDS |= set(re.findall(r"\w+", (ROOT / "docs" / "monitoring" / "alerts.yml").read_text("utf-8")))
# it names files and classes of mindformers
ABOUT_UPSTREAM = "upstream_issues.md"
# elsewhere `report.x` can be a variable
ABOUT_MODULES = {"architecture.md", "design_rules.md", "simulation.md"}
DOCUMENTS = pytest.mark.parametrize(
    "document",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: path.name,
)


def has(module: str, name: str) -> bool:
    """Returns whether a module, or the ``__init__`` of a package, of this name contains the word
    ``name``; True if there is no such module."""
    found = [
        words
        for path, words in FILES.items()
        if module == (path.parent.name if path.stem == "__init__" else path.stem)
    ]
    return not found or any(name in words for words in found)


@DOCUMENTS
def test_every_python_file_exists(document):
    if document.name == ABOUT_UPSTREAM:
        return
    named = re.findall(r"(?<![\w./-])([\w/]+\.py)\b", document.read_text())
    assert [name for name in named if not any((room / name).is_file() for room in ROOMS)] == []


@DOCUMENTS
def test_every_class_and_every_name_of_a_module_exists(document):
    if document.name == ABOUT_UPSTREAM:
        return
    # has words of its own
    text = re.sub(
        r"<!-- needs: Kubernetes -->\n```.*?```", "", document.read_text(), flags=re.DOTALL
    )
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    dotted = set(re.findall(r"\b(mindresume)\.(\w+)", code))
    if document.name in ABOUT_MODULES:
        dotted |= set(re.findall(r"(?<![\w./])([a-z]\w+)\.(?!(?:py|md|json)\b)(\w+)", code))
    known = (
        {field.name for field in fields(Settings)}
        | {path.stem for path in FILES}
        | {room.name for room in ROOMS}
    )
    classes = set(re.findall(r"\b[A-Z][a-z]+[A-Z][a-z]\w*", code))
    assert {
        f"{module}.{name}" for module, name in dotted if name not in known and not has(module, name)
    } == set()
    words = classes | set(
        re.findall(r"(?<![\w/])[a-z]+(?:_[a-z]+)+\b", code)
        if document.name in ABOUT_MODULES
        else ()
    )
    assert words - known - WORDS == set()


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.zh.md")), ids=lambda path: path.name
)
def test_a_chinese_page_has_the_code_and_the_links_of_the_english_one(page):
    english = (page.parent / page.name.replace(".zh.md", ".md")).read_text()

    def facts(text):
        """Returns the lines of code without comments, and the targets of links."""
        blocks = [re.sub(r"#.*", "", block) for block in re.findall(r"```.*?```", text, re.DOTALL)]
        return (
            {line.strip() for block in blocks for line in block.splitlines()},
            {
                link.replace("_CN", "").replace(".zh.", ".")
                for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)
            },
        )

    assert facts(page.read_text()) == facts(english)


@DOCUMENTS
def test_every_link_names_an_existing_file(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def anchors_of(text: str) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them; mkdocs.yml makes the same."""
    headings = re.findall(
        r"^#{1,6} +(.*?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M
    )
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_anchors_are_those_of_github():
    text = (
        "# A: `mindresume run`, 1.0\n```\n# no heading\n```\n## [Save](save.md) / load_it  "
        "\n### 配置段 `memory_tier`\n"
    )
    assert anchors_of(text) == {"a-mindresume-run-10", "save--load_it", "配置段-memory_tier"}


@DOCUMENTS
def test_every_anchor_of_a_link_exists(document):
    broken = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text()):
        target = document.parent / link if link else document
        if target.suffix == ".md" and anchor not in anchors_of(target.read_text()):
            broken.append(f"{link}#{anchor}")
    assert broken == []


@DOCUMENTS
def test_links_of_a_chinese_page_lead_to_chinese_pages(document):
    """In a view of the repository, too, where nothing chooses the language of a page."""
    is_chinese = document.name.endswith((".zh.md", "_CN.md"))
    folder = document.parent
    # "[English](README.md)" leads to the twin
    for link in re.findall(r"(?<!\[English)\]\((?!https?:)([^)#]+\.md)", document.read_text()):
        twins = (link.replace(".md", ".zh.md"), link.replace(".md", "_CN.md"))
        if is_chinese:
            assert not any((folder / twin).exists() for twin in twins), link


def test_a_paragraph_of_a_chinese_page_is_one_line():
    """A line break after Chinese punctuation would be shown as a space."""
    wrapped = [
        (page.name, line)
        for page in [*(ROOT / "docs").glob("*.zh.md"), *ROOT.glob("*_CN.md")]
        for line in re.findall(
            r"^(?![|#<`]).*[\u3000-\u303f\uff00-\uffef]\n(?= *[\w*`（“\[])(?! *(?:[-*]|\d+\.) )",
            re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL),
            re.MULTILINE,
        )
    ]
    assert wrapped == []


def test_every_page_has_a_chinese_one():
    pages = {path.name.removesuffix(".md") for path in (ROOT / "docs").glob("*.md")}
    pages -= {"status", "upstream_issues"}
    english = {name for name in pages if not name.endswith(".zh")}
    assert {name.removesuffix(".zh") for name in pages - english} == english


@pytest.mark.parametrize(
    "page, terms",
    [
        ("index.zh", "断点续训 中断续训 容错"),
        ("selection.zh", "断点续训 中断续训"),
        ("layouts.zh", "增减卡续训 策略转换续训 权重转换"),
        ("preemption.zh", "临终"),
        ("with_mindcluster.zh", "mindcluster mindio 亚健康 高可用 临终 弹性"),
        ("several_nodes.zh", "弹性 缩容"),
        ("supervisor.zh", "容错 高可用 自动恢复"),
        ("migration.zh", "升级 回滚"),
        ("releases.zh", "aarch64 鲲鹏"),
        ("layouts", "elastic"),
        ("with_mindcluster", "mindcluster"),
        ("with_mindcluster", "mindio"),
        ("migration", "upgrade"),
        ("migration", "rollback"),
        ("releases", "aarch64"),
        ("layouts", "resharding"),
        ("several_nodes", "elastic"),
        ("supervisor", "fault tolerance"),
        ("retention", "retention"),
        ("scrub", "scrubbing"),
        ("memory_tier", "memory tier"),
    ],
)
def test_a_page_begins_with_the_words_that_users_search(page, terms):
    """Titles and headings weigh most in a search, then come the first lines."""
    lines = (ROOT / "docs" / f"{page}.md").read_text("utf-8").lower().splitlines()
    begin = "\n".join([*lines[:5], *(line for line in lines if line.startswith("#"))])
    terms = [terms] if terms.isascii() else terms.split()
    assert [term for term in terms if term not in begin] == []

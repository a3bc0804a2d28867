"""Makes the part of docs/command_reference.md: each command with its help, arguments and options.

The text comes from the functions that implement the commands: their docstrings, and the
``typer.Argument`` or ``typer.Option`` of each parameter. What several commands have in common
stands once, above them. The Chinese page has the texts of commands.zh.json: Markdown, by ``key`` of
the English text, so that a text whose English has changed is missing there.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from typer import Context
from typer.models import ArgumentInfo, OptionInfo

from mindresume import cli

SOURCE = "mindresume/cli"
CHINESE = json.loads(Path(__file__).with_name("commands.zh.json").read_text(encoding="utf-8"))
WIDTH = 140
TEXTS = {
    "en": {
        "common": "Of several commands",
        "same": "These mean the same in each command that names them:",
        "default": " (default `{}`): ",
        "colon": ": ",
        "status": "**Exit status:** ",
        "above": "As above: {}.",
        "comma": ", ",
        "space": " ",
    },
    "zh": {
        "common": "多个命令共有的参数",
        "same": "下列参数在各个命令中含义相同：",
        "default": "（默认 `{}`）：",
        "colon": "：",
        "status": "**退出码**：",
        "above": "同上：{}。",
        "comma": "、",
        "space": "",
    },
}
_CODE = re.compile(
    r"""`[^`]*`                                             # code already
        | (?<![\w/])--[a-z][a-z-]*                              # an option
        | [a-z]+(?:_[a-z]+)+:\ (?:True|False|[A-Z]+\b)          # a line of YAML
        | [\w./{}*=@~-]*[_*{}=](?:[\w./{}*=@~,-]*[\w{}*=])?     # a name, a pattern, key=value
        """,
    re.VERBOSE,
)
_PAGE = re.compile(r"docs/(\w+\.md)")
_EXAMPLE = re.compile(r"\[bold\](.*?)\[/bold\][ ]*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """Describes one argument or option. ``names``: "--step N", or "DIR" for an argument."""

    names: str
    default: str
    help: str
    panel: str
    is_option: bool


def part(language: str) -> str:
    """Returns the part of the page in "en" or "zh": what several commands have in common, and a
    section for each."""
    texts = TEXTS[language]
    found = {name: parameters(function) for name, function in sorted(commands())}
    counts = Counter(parameter for each in found.values() for parameter in each)
    common: dict[str, Parameter] = {}
    for parameter, count in counts.most_common():
        if count > 1:
            common.setdefault(parameter.names, parameter)  # the meaning that most commands give it
    shared = sorted(common.values(), key=lambda each: (each.is_option, each.names))
    blocks = [f"## {texts['common']}", texts["same"], "\n".join(_items(shared, language))]
    for name, function in sorted(commands()):
        paragraphs, status = _help(inspect.getdoc(function) or "", language)
        blocks += [f"## `mindresume {name}`", *paragraphs]
        own = [each for each in found[name] if each != common.get(each.names)]
        also = texts["comma"].join(f"`{each.names}`" for each in found[name] if each not in own)
        above = [f"- {texts['above'].format(also)}"] if also else []
        items = [*status, *_items(own, language), *above]
        if items:
            blocks.append("\n".join(items))
    return "\n\n".join(blocks)


def key(text: str) -> str:
    """Returns the name of an English text in commands.zh.json: how it begins, and a checksum."""
    words = text.split()
    return f"{' '.join(words[:4])} ~{zlib.crc32(' '.join(words).encode())}"


def english() -> Iterator[tuple[str, str]]:
    """Yields the name of a command and a text of its help, for each text of each command."""
    for name, function in commands():
        for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
            example = _EXAMPLE.fullmatch(paragraph)
            text, _, status = " ".join(paragraph.split()).partition("Exit status: ")
            yield from ((name, each) for each in ([example[2]] if example else [text, status]))
        for parameter in parameters(function):
            yield from ((name, each) for each in (parameter.help, parameter.panel))


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the name and the function of each command that ``mindresume --help`` lists."""
    for module in pkgutil.iter_modules(cli.__path__):
        import_module(f"{cli.__name__}.{module.name}")
    for command in cli.app.registered_commands:
        if command.callback is not None and not command.hidden:
            yield command.name or command.callback.__name__.replace("_", "-"), command.callback


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Returns the arguments and options of a command, in the order of its help. Raises TypeError
    for one without help."""
    found = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint = parameter.annotation
        if hint is Context:
            continue  # typer itself passes it
        if get_origin(hint) is not Annotated:
            raise TypeError(
                f"{function.__name__}: {name} is {hint}, expected Annotated[..., typer.Argument "
                f"or typer.Option]"
            )
        kind, info = get_args(hint)[:2]
        if not info.hidden:
            found.append(_parameter(name, kind, info, parameter.default))
    return sorted(found, key=lambda each: each.is_option)


def _parameter(name: str, kind: Any, info: ArgumentInfo | OptionInfo, default: Any) -> Parameter:
    metavar = info.metavar or ("" if kind is bool else name.upper())
    if isinstance(info, ArgumentInfo):
        many = "..." if get_origin(kind) is list else ""
        is_needed = default is inspect.Parameter.empty
        names = f"{metavar}{many}" if is_needed else f"[{metavar}{many}]"
    else:
        declared = [
            text
            for text in (info.default, *(info.param_decls or ()))
            if isinstance(text, str) and text[:1] == "-"
        ]
        names = f"{', '.join(declared or ['--' + name.replace('_', '-')])} {metavar}".strip()
    text = info.help or ""
    is_told = (
        "efault: " in text
        or default is None
        or default is False
        or default == ""
        or default is inspect.Parameter.empty
    )
    shown = "" if is_told else f"{default:g}" if isinstance(default, float) else str(default)
    panel = getattr(info, "rich_help_panel", None) or ""
    return Parameter(names, shown, text, panel, isinstance(info, OptionInfo))


def _items(rows: Sequence[Parameter], language: str) -> Iterator[str]:
    """Yields a line for each parameter: those without a panel, then those of each panel below its
    name."""
    texts = TEXTS[language]
    panel = ""
    for row in sorted(rows, key=lambda each: each.panel != ""):
        if row.panel != panel:
            panel = row.panel
            yield f"- **{_markdown(panel, language)}**"
        until = texts["default"].format(row.default) if row.default else texts["colon"]
        indent = "    " if panel else ""
        yield f"{indent}- `{row.names}`{until}{_markdown(row.help, language)}"


def _help(text: str, language: str) -> tuple[list[str], list[str]]:
    """Returns the paragraphs of a docstring as Markdown, with examples as one block of code; and
    the exit statuses as an item of a list, if it names any."""
    texts = TEXTS[language]
    paragraphs: list[str] = []
    statuses: list[str] = []
    examples: list[str] = []
    for paragraph in [*text.split("\n\n"), ""]:
        example = _EXAMPLE.fullmatch(paragraph)
        if example:
            comment = CHINESE.get(key(example[2]), example[2]) if language == "zh" else example[2]
            comment = f"      # {comment}" if comment else ""
            examples.append(example[1].replace("\n", " \\\n    ") + comment)
            continue
        if examples:
            paragraphs.append("\n".join(["```shell", *examples, "```"]))
            examples = []
        before, status, after = " ".join(paragraph.split()).partition("Exit status: ")
        if before:
            before = _markdown(before, language)
            if len(paragraphs) == 1 and paragraphs[0][-1] in ".。":
                paragraphs[0] += texts["space"] + before  # the summary
            else:
                paragraphs.append(before)
        if status:
            statuses.append(f"- {texts['status']}{_markdown(after, language)}")
    return [_filled(each) if language == "en" else each for each in paragraphs], statuses


def _filled(text: str) -> str:
    """Returns a paragraph in lines as wide as those of the pages written by hand; a block of code
    as it is."""
    if text.startswith("```"):
        return text
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _markdown(text: str, language: str) -> str:
    """Returns a text of the help as Markdown, in "zh" its translation (or itself, if it has none):
    names, options and patterns are code, pages are links."""
    text = " ".join(text.split())
    if language == "zh" and key(text) in CHINESE:
        return CHINESE[key(text)]
    marked = _CODE.sub(lambda found: found[0] if found[0][0] == "`" else f"`{found[0]}`", text)
    return _PAGE.sub(r"[\1](\1)", marked)

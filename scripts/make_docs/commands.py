"""Makes the part of docs/command_reference.md: each command with its usage, help, arguments and
options.

The text comes from the functions that implement the commands: their docstrings, and the
``typer.Argument`` or ``typer.Option`` of each parameter.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

from typer import Context
from typer.models import ArgumentInfo, OptionInfo

from mindresume import cli

SOURCE = "mindresume/cli"
_CODE = re.compile(
    r"""`[^`]*`                                             # code already
                   | (?<![\w/])--[a-z][a-z-]*                              # an option
                   | [a-z]+(?:_[a-z]+)+:\ (?:True|False|[A-Z]+\b)          # a line of YAML
                   | [\w./{}*=@~-]*[_*{}=](?:[\w./{}*=@~,-]*[\w{}*=])?    # a name, a pattern, key=value
                   """,  # noqa: E501
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


def part() -> str:
    """Returns the part: a table of all commands, and a section for each."""
    found = sorted(commands())
    rows = ["| command | what it does |", "|---|---|"]
    for name, function in found:
        summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
        rows.append(f"| [`mindresume {name}`](#mindresume-{name}) | {_cell(summary)} |")
    return "\n\n".join(["\n".join(rows), *(_section(name, function) for name, function in found)])


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
                f"{function.__name__}: {name} is {hint}, expected Annotated[..., typer.Argument or "
                "typer.Option]"
            )
        kind, info = get_args(hint)[:2]
        if not info.hidden:
            found.append(_parameter(name, kind, info, parameter.default))
    return found


def _parameter(name: str, kind: Any, info: ArgumentInfo | OptionInfo, default: Any) -> Parameter:
    metavar = info.metavar or ("" if kind is bool else name.upper())
    if isinstance(info, ArgumentInfo):
        many = "..." if get_origin(kind) is list else ""
        names = f"{metavar}{many}" if default is inspect.Parameter.empty else f"[{metavar}{many}]"
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
    return Parameter(
        names,
        shown,
        text,
        getattr(info, "rich_help_panel", None) or "",
        isinstance(info, OptionInfo),
    )


def _section(name: str, function: Callable[..., Any]) -> str:
    found = parameters(function)
    arguments = [parameter for parameter in found if not parameter.is_option]
    usage = " ".join(
        ["mindresume", name, "[OPTIONS]", *(parameter.names for parameter in arguments)]
    )
    blocks = [
        f"## `mindresume {name}`",
        f"```text\n{usage}\n```",
        *_help(inspect.getdoc(function) or ""),
    ]
    if arguments:
        blocks.append(
            "\n".join(
                [
                    "| argument | meaning |",
                    "|---|---|",
                    *(
                        f"| {_name(parameter.names)} | {_cell(parameter.help)} |"
                        for parameter in arguments
                    ),
                ]
            )
        )
    options = [parameter for parameter in found if parameter.is_option]
    for panel in dict.fromkeys(parameter.panel for parameter in options):
        rows = [f"| {_cell(panel) or 'option'} | default | meaning |", "|---|---|---|"]
        for parameter in options:
            if parameter.panel == panel:
                default = f"`{parameter.default}`" if parameter.default else ""
                rows.append(f"| {_name(parameter.names)} | {default} | {_cell(parameter.help)} |")
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _help(text: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring as Markdown: examples as one block of code, the exit
    statuses as a paragraph."""
    examples: list[str] = []
    for paragraph in text.split("\n\n"):
        example = _EXAMPLE.fullmatch(paragraph)
        if example:
            comment = f"      # {example[2]}" if example[2] else ""
            examples.append(example[1].replace("\n", " \\\n    ") + comment)
            continue
        if examples:
            yield "\n".join(["```shell", *examples, "```"])
            examples = []
        before, status, after = paragraph.partition("Exit status: ")
        if before.strip():
            yield _markdown(before.strip())
        if status:
            yield f"**Exit status:** {_markdown(after)}"
    if examples:
        yield "\n".join(["```shell", *examples, "```"])


def _markdown(text: str) -> str:
    """Returns ``text`` with names, options and patterns as code, so that Markdown does not
    interpret them; and with links to the pages that it names."""
    marked = _CODE.sub(lambda found: found[0] if found[0][0] == "`" else f"`{found[0]}`", text)
    return _PAGE.sub(r"[\1](\1)", marked)


def _name(text: str) -> str:
    """Returns ``text`` as code in a cell. Within backticks GitHub and mkdocs read an escaped bar in
    different ways."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return _markdown(" ".join(text.split())).replace("|", "\\|")

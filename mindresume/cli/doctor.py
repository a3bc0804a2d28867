"""``mindresume doctor``"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import WIDE, AsJson, print_json, say


@app.command()
def doctor(
    config: Annotated[
        str,
        typer.Option("--config", metavar="FILE", help="The YAML of the training."),
    ] = "",
    folder: Annotated[
        str,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where the training would save. Default: output_dir of the YAML, else ./output.",
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """Examines this machine: what is installed, what mindresume will do, where saves go.

    Run it where the training will run, in its environment. Nothing is left behind; the output
    folder gets one small file, which is removed. The import of mindformers takes some seconds.

    Exit status: 0: a training can start; 1: something is wrong.
    """
    from mindresume.api.doctor import WRONG, examine

    examination = examine(config, folder)
    if json:
        print_json(examination.to_json())
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
        width = max(len(check.about) for check in examination.checks) if columns >= 80 else 0
        indent = " " * (width + 9)
        for check in examination.checks:
            about = f"{check.about:<{width}} " if width else f"{check.about}:"
            _say_folded(f"{check.state:<5}  {about} {check.found}", columns, indent)
            if check.remedy:
                _say_folded(f"{indent}-> {check.remedy}", columns, f"{indent}   ")
        wrong = [check.about for check in examination.checks if check.state == WRONG]
        hint = "" if config else "; --config FILE examines its YAML, too"
        say()
        say(f"wrong: {', '.join(wrong)}" if wrong else f"a training can start here{hint}")
    raise typer.Exit(0 if examination.is_fit else 1)


def _say_folded(text: str, columns: int, indent: str) -> None:
    say(
        textwrap.fill(
            text,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )

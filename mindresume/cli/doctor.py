"""``mindresume doctor``"""

from __future__ import annotations

from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, print_json, say


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
        width = max(len(check.about) for check in examination.checks)
        for check in examination.checks:
            say(f"{check.state:<5}  {check.about:<{width}}  {check.found}")
            if check.remedy:
                say(f"{'':{width + 7}}  {check.remedy}")
        wrong = [check.about for check in examination.checks if check.state == WRONG]
        say()
        say(f"wrong: {', '.join(wrong)}" if wrong else "a training can start here")
    raise typer.Exit(0 if examination.is_fit else 1)

"""``mindresume report``"""
from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import AsJson, locate, print_json, say
from mindresume.errors import ConfigError
from mindresume.store.storage import PosixStorage, publish

if TYPE_CHECKING:
    from mindresume.report.made import Report

Output = Annotated[str, typer.Argument(metavar="OUTPUT_DIR", help="The output folder of the training, with its logs and its "
                                       "checkpoint folder (the folder of the run above it will do, or the checkpoint folder).")]
Page = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="The page; the picture beside it is called like "
                                          "it, with .png. Default report.html, none with --json.")]
Logs = Annotated[list[str] | None, typer.Option("--logs", metavar="DIR", help="Another folder with logs: LOG_MF_PATH, or LOG_DIR "
                                                "of msrun_launcher.sh. May be given several times.")]


@app.command()
def report(folder: Output, page: Page = None, json: AsJson = False, logs: Logs = None) -> None:
    """Makes one page of what a training went through, over all its starts: losses, saves, deaths, resumes, lost steps and time.

    From the logs of mindformers and mindresume below OUTPUT_DIR (log*/rank_*/info.log*, msrun_log*/worker_*.log) and the records
    of the checkpoints. What is not there is left out, and the page says so. Nothing but the page and the picture is written.
    """
    from mindresume.report.made import make, to_json
    output, root = places(folder)
    for more in logs or ():
        if not os.path.isdir(more):
            raise FileNotFoundError(f"--logs {more}: there is no such folder")
    target = Path(page) if page is not None else None if json else Path("report.html")
    if target is not None and target.suffix not in (".html", ".htm"):
        raise ConfigError(f"-o {page}: the page is an HTML file; give a name that ends in .html")
    if target is not None and not target.absolute().parent.is_dir():
        raise ConfigError(f"-o {page}: there is no folder {target.parent}; make it first, or give another name")
    if target is not None:
        from mindresume.report import chart
        chart.check_installed()
    made = make(PosixStorage(), output, root, logs or ())
    files = write(made, target) if target is not None else []
    if json:
        print_json({**to_json(made), "files": files})
        return
    from mindresume.report.page import sentence
    say(sentence(made))
    say("\n".join(files))


def places(folder: str) -> tuple[str, str]:
    """The output folder, and the checkpoint folder in it."""
    root = locate(folder)
    if os.path.abspath(root) == os.path.abspath(folder) and os.path.basename(os.path.abspath(root)) == "checkpoint":
        return os.path.dirname(os.path.abspath(root)), root
    inner = os.path.join(folder, "output")
    output = inner if root.startswith(inner + os.sep) or root == folder and os.path.isdir(inner) else folder
    return output, root if root != folder else os.path.join(output, "checkpoint")


def write(made: Report, target: Path) -> list[str]:
    """The page and the picture; returns their paths. The page is replaced at once, so that a browser never sees half of it."""
    from mindresume.report import chart, page
    figure = chart.draw(made.shares) if made.shares else None
    picture = target.with_suffix(".png")
    contents = {target: page.html(made, chart.svg(figure) if figure else "").encode()}
    if figure is not None:
        contents[picture] = chart.png(figure)
    for path, content in contents.items():
        publish(PosixStorage(), os.path.abspath(path), [content], str(os.getpid()))
    return [str(path) for path in contents]

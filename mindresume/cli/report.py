"""Implements ``mindresume report``, ``advise`` and ``proof``, which read what a training has left
behind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mindresume.cli import app
from mindresume.cli.common import NOTHING, AsJson, print_json, print_table, say, time_text
from mindresume.errors import ConfigError
from mindresume.storage import publish
from mindresume.storage.posix import PosixStorage

Output = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT_DIR",
        help="The output folder of the training, with its logs, event files and checkpoint folder "
        "(or the folder above it, or the checkpoint folder).",
    ),
]
Logs = Annotated[
    list[str] | None,
    typer.Option(
        "--logs",
        metavar="DIR",
        help="Another folder with logs or event files: LOG_MF_PATH, or LOG_DIR of "
        "msrun_launcher.sh (repeat for more).",
    ),
]


@app.command()
def report(
    folder: Output,
    page: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page. Default: report.html, with --json none.",
        ),
    ] = None,
    json: AsJson = False,
    logs: Logs = None,
) -> None:
    """Writes one page about a training over all its restarts: losses, saves, failures, lost steps,
    goodput and timeline.

    It reads mindresume's event files (mindresume_events/*.jsonl) and mindformers' logs
    (log*/rank_*/info.log*, msrun_log*/worker_*.log) below OUTPUT_DIR, and the records of the
    checkpoints. The page says what is missing. Only the page is written.
    """
    from mindresume.report.advice import advice_of, sentence_of
    from mindresume.report.builder import build_report, folders_of, to_json

    output, root = folders_of(folder)
    check_folders(logs or ())
    target = Path(page) if page is not None else None if json else Path("report.html")
    if target is not None:
        if target.suffix not in (".html", ".htm"):
            raise ConfigError(
                f"-o {page}: the page is an HTML file; give a name that ends in .html"
            )
        if not target.absolute().parent.is_dir():
            raise ConfigError(
                f"-o {page}: there is no folder {target.parent}; make it first, or give another "
                f"name"
            )
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError(
                "a report needs jinja2, which this Python does not have: pip install "
                "'mindresume[report]' (or jinja2 alone); or use --json, which does not need it"
            )
    built = build_report(PosixStorage(), output, root, logs or ())
    if target is not None:
        from mindresume.report.page import html

        # Replaced atomically, so that a browser never reads a part of it.
        publish(PosixStorage(), os.path.abspath(target), [html(built).encode()], str(os.getpid()))
    files = [] if target is None else [str(target)]
    advice = advice_of(built)
    if json:
        print_json(
            {**to_json(built), "advice": advice.to_json() if advice else None, "files": files}
        )
        return
    from mindresume.report.tables import recovery_summary, summary

    say(summary(built))
    if built.recoveries:
        say(recovery_summary(built))
    if advice:
        say(f"how often to save: {sentence_of(advice)}")
    say("\n".join(files))


def check_folders(logs: Iterable[str]) -> None:
    """Raises FileNotFoundError for a folder of ``--logs`` that does not exist."""
    for folder in logs:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"--logs {folder}: there is no such folder")


# ---- advise --------------------------------------------------------------------------------------


@app.command()
def advise(folder: Output, json: AsJson = False, logs: Logs = None) -> None:
    """Advises how often to save: the interval between saves that loses the least time, by what the
    training has measured.

    It reads what `report` reads: how long the training stopped for a save, how long a save took,
    the steps and the failures. The interval is that of Young and Daly; below five failures nothing
    is proposed. Nothing is written. docs/advice.md explains the numbers.

    Exit status: 0; 2 if too little was measured.
    """
    from mindresume.report.advice import advise as advise_on
    from mindresume.report.advice import lines_of

    check_folders(logs or ())
    advice = advise_on(folder, logs=logs or ())
    if json:
        print_json(advice.to_json())
        return
    for name, text in lines_of(advice):
        say(f"{name:9}  {text}" if name else text)


# ---- proof ---------------------------------------------------------------------------------------


@app.command()
def proof(folder: Output, json: AsJson = False, logs: Logs = None) -> None:
    """Shows for each resume of a training what proves that it was exact.

    At the first step the weights are compared with what was loaded, and each step that a run trains
    for the second time with what the run before it recorded: samples, batch, learning rate, loss
    scale and loss. docs/reliability.md explains what a difference means. Nothing is written.

    Exit status: 0; 1 if a resume differs; 3 if there was no resume.
    """
    from mindresume.report.builder import DIFFERS, folders_of, proofs_in

    output, _ = folders_of(folder)
    check_folders(logs or ())
    proofs = proofs_in([output, *(logs or ())])
    if json:
        print_json([asdict(row) for row in proofs])
    elif not proofs:
        say(f"no resume is recorded in {output}", error=True)
    else:
        print_table(
            [
                {
                    "resumed": time_text(row.time),
                    "run": row.run_id or "?",
                    "after step": str(row.step),
                    "resume": row.verdict,
                    "tensors": str(row.tensors),
                    "steps": str(row.steps),
                    "loss differs by": (
                        ""
                        if row.largest_loss_difference is None
                        else f"{row.largest_loss_difference:.2g}"
                    ),
                    "": row.text,
                }
                for row in proofs
            ],
            right=("after step", "tensors", "steps"),
            folded=("",),
            yellow=[index for index, row in enumerate(proofs) if row.verdict == DIFFERS],
        )
    if not proofs:
        raise typer.Exit(NOTHING)
    if any(row.verdict == DIFFERS for row in proofs):
        raise typer.Exit(1)

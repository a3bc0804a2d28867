"""Defines the command line. It starts without mindspore, and imports what a command needs when it
runs."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="mindresume",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lists, checks, converts and removes checkpoints, and reports on trainings.\n\n"
    "[bold]mindresume doctor --config my.yaml[/bold]  examines this machine and a configuration\n\n"
    "[bold]mindresume ls output/checkpoint[/bold]      every saved step, complete or not\n\n"
    "[bold]mindresume which output/checkpoint[/bold]   the checkpoint that a resume would take, "
    "and why nothing newer\n\n"
    "[bold]mindresume verify output/checkpoint[/bold]  reads every byte and names what is "
    "damaged\n\n"
    "[bold]mindresume scrub output/checkpoint[/bold]   re-reads what is kept, names what rotted, "
    "and can repair it\n\n"
    "[bold]mindresume report output[/bold]             one page: loss, failures, lost steps, "
    "goodput, timeline\n\n"
    "[bold]mindresume run -- COMMAND...[/bold]            starts a training, and again when a rank "
    "died or hangs\n\n"
    "[bold]mindresume advise output[/bold]             how often to save, from the measured costs "
    "and failures\n\n"
    "[bold]mindresume proof output[/bold]              what proves that each resume was exact\n\n"
    "[bold]mindresume prune output/checkpoint --keep-last 3[/bold]  removes older checkpoints; "
    "--dry-run only shows them\n\n"
    "[bold]mindresume drill --dir /shared[/bold]       tests on your file system that no crash "
    "loses a checkpoint\n\n"
    "[bold]mindresume convert output/checkpoint new --to dp=4[/bold]  cuts a checkpoint for "
    "another parallel strategy\n\n"
    "[bold]mindresume merge output/checkpoint merged[/bold]  merges the slices of all ranks\n\n"
    "[bold]mindresume export-hf output/checkpoint hf --config config.json[/bold]  writes a Hugging "
    "Face folder\n\n"
    "[bold]mindresume inspect output/checkpoint[/bold]  every tensor: global shape, layout, which "
    "rank stores what\n\n"
    "[bold]mindresume diff output/checkpoint merged[/bold]  compares two checkpoints of any "
    "layout, bit by bit\n\n"
    "Folders that mindformers alone wrote are supported too. --json prints one JSON document for "
    "programs.",
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        from mindresume import __version__

        found = []
        for package in ("mindformers", "mindspore"):
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                found.append(f"no {package}")
        typer.echo(
            f"mindresume {__version__} ({', '.join(found)}, Python {platform.python_version()})"
        )
        raise typer.Exit()


@app.callback()
def _before_each_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of mindresume, mindformers, mindspore and Python.",
        ),
    ] = False,
) -> None:
    """Does nothing; its option stands before a command."""


def main() -> None:
    """Runs the console script. Errors of mindresume and of the system print one line and exit with
    status 2, as wrong arguments do."""
    from mindresume.cli import (  # noqa: F401  each module registers its commands
        catalog,
        conversions,
        doctor,
        drill,
        inspect,
        maintenance,
        report,
        run,
    )

    run_app(app, "mindresume")


def run_app(commands: typer.Typer, program: str) -> None:
    """Runs commands as ``program``. An error of mindresume or of the system is one line."""
    import sys

    from mindresume.cli.common import Stopped, say
    from mindresume.errors import MindResumeError
    from mindresume.storage import error_text

    try:
        commands()
    except Stopped as stopped:
        say(f"{program}: {stopped}", error=True)
        sys.exit(128 + stopped.signal)
    except (MindResumeError, OSError) as error:
        code = f"[{error.code}] " if isinstance(error, MindResumeError) else ""
        say(f"{program}: {code}{error_text(error)}", error=True)
        sys.exit(2)

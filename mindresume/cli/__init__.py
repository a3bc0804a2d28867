"""Defines the command line. It starts without mindspore, and imports what a command needs when it
runs."""

from __future__ import annotations

import re
from functools import partialmethod
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# the commands by what a user wants, in the order of the help
GROUPS = {
    "Look": ("ls", "which", "inspect", "report", "proof", "advise"),
    "Check": ("doctor", "verify", "scrub", "diff", "drill"),
    "Change": ("prune", "convert", "merge", "export-hf", "flush"),
    "Run": ("run", "plugin-path"),
}


def _without_types_of_flags(parameters: Any) -> Any:
    """Returns the parameters of a help. A flag takes no value, so none is shown."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    """Shows the docstring of a command in paragraphs, in its group."""

    def __init__(self, name: str | None, *, help: str | None = None, **settings: Any):
        settings["rich_help_panel"] = next(
            (group for group, names in GROUPS.items() if name in names), None
        )
        super().__init__(name, help=re.sub(r"(?<!\n)\n(?!\n)", " ", help or ""), **settings)

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in GROUPS.values() for name in names if name in self.commands]

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class _CommandLine(typer.Typer):
    command = partialmethod(typer.Typer.command, cls=_Command)  # type: ignore[assignment]


app = _CommandLine(
    name="mindresume",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lists, checks, converts and removes checkpoints, reports on trainings, restarts jobs.\n\n"
    "[bold]mindresume doctor --config my.yaml[/bold]    can a training start here?\n"
    "[bold]mindresume run -- COMMAND...[/bold]          starts it, and again when a rank fails\n"
    "[bold]mindresume which output/checkpoint[/bold]    what a resume would take, and why\n"
    "[bold]mindresume report output[/bold]              one page: loss, failures, goodput\n\n"
    "`mindresume COMMAND --help` explains one; --json prints one JSON document for programs. "
    "Folders that mindformers alone wrote are supported too.",
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

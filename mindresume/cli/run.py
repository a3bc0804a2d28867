"""Implements ``mindresume run``, and ``plugin-path`` for a start without it."""

from __future__ import annotations

import json as json_module
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from mindresume import runtime
from mindresume.cli import app
from mindresume.cli.common import say
from mindresume.errors import ConfigError, MindResumeError
from mindresume.events import PREFIX, Emitter, Event, Handler, Notice, Progress, warning
from mindresume.storage import Hurry

_HANG = "When is it a hang"
_END = "How a job is ended"
_NODES = "Several nodes"


def _in_seconds(name: str, panel: str, help: str, show_default: bool = True) -> Any:
    """Returns the option of a duration."""
    return typer.Option(
        name, min=0, metavar="S", rich_help_panel=panel, help=help, show_default=show_default
    )


def _notify(name: str, metavar: str, help: str, default: str = "") -> Any:
    """Returns an option of the notifications."""
    variable = f"MSRUN_NOTIFY_{name.upper()}"
    return typer.Option(
        f"--notify-{name}",
        metavar=metavar,
        envvar=variable,
        show_envvar=False,
        show_default=False,
        rich_help_panel="Notifications",
        help=f"{help} Default: {variable}{default}.",
    )


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="What to start: msrun, scripts/msrun_launcher.sh or any other command, with its "
            "arguments.",
        ),
    ],
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            metavar="N",
            help="Restarts in a row without progress before the job is given up. A start makes "
            "progress if it leaves a later checkpoint than all before it. 0: no restart at all.",
        ),
    ] = 5,
    hang_timeout: Annotated[
        float,
        _in_seconds(
            "--hang-timeout",
            _HANG,
            "Seconds without a finished step after the first one; an evaluation "
            "between two steps counts. 0: never.",
        ),
    ] = 1800,
    start_timeout: Annotated[
        float,
        _in_seconds(
            "--start-timeout",
            _HANG,
            "Seconds from the start to the end of the first step, and for the end "
            "of the training (last save, uploads). 0: no limit.",
        ),
    ] = 7200,
    slow_factor: Annotated[
        float,
        typer.Option(
            "--slow-factor",
            min=0,
            metavar="K",
            help="Report a rank that needs K times the median of its node outside of the network "
            "(data, callbacks), and a save that takes K times the usual time. 0: do not.",
        ),
    ] = 0,
    kill_after: Annotated[
        float,
        _in_seconds(
            "--kill-after",
            _END,
            "Seconds between SIGTERM and SIGKILL after a rank has died or hangs. The others wait "
            "for it in a collective and cannot handle SIGTERM.",
        ),
    ] = 1.0,
    save_timeout: Annotated[
        float,
        _in_seconds(
            "--save-timeout", _END, "The same for a rank or process that is writing a checkpoint."
        ),
    ] = 20.0,
    leave: Annotated[
        float | None,
        _in_seconds(
            "--leave",
            _END,
            "Seconds to save and exit after this process got SIGTERM. Default: "
            "MSRUN_LEAVE, else MSRUN_GRACE, else 60.",
            show_default=False,
        ),
    ] = None,
    stuck: Annotated[
        float | None,
        _in_seconds(
            "--stuck",
            _END,
            "Seconds after SIGKILL until a process that does not end is named and left behind. "
            "Default: MSRUN_STUCK, else 60.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            metavar="N",
            rich_help_panel=_NODES,
            help="Nodes of the job. Start this command on each of them.",
        ),
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank",
            min=0,
            metavar="K",
            rich_help_panel=_NODES,
            help="Number of this node, from 0.",
        ),
    ] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            metavar="DIR",
            rich_help_panel=_NODES,
            show_default=False,
            help="A folder that all nodes see, of this job alone. Needed with --nodes.",
        ),
    ] = None,
    node_timeout: Annotated[
        float,
        typer.Option(
            "--node-timeout",
            min=1,
            metavar="S",
            rich_help_panel=_NODES,
            help="Seconds to wait for a node, at a start and while nothing is heard of it. NFS can "
            "show its files a minute late.",
        ),
    ] = 600,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes",
            min=1,
            metavar="M",
            rich_help_panel=_NODES,
            show_default=False,
            help="Go on with as few as M nodes if others do not come back; needs placeholders in "
            "COMMAND. Default: all nodes.",
        ),
    ] = None,
    local_workers: Annotated[
        int,
        typer.Option(
            "--local-workers",
            min=1,
            metavar="W",
            rich_help_panel=_NODES,
            help="Ranks of each node, for {workers}.",
        ),
    ] = 8,
    node_address: Annotated[
        str,
        typer.Option(
            "--node-address",
            metavar="ADDRESS",
            rich_help_panel=_NODES,
            show_default=False,
            help="Address of this node, for {master_addr}. Default: that of its host name.",
        ),
    ] = "",
    events: Annotated[
        str,
        typer.Option(
            "--events",
            metavar="DIR",
            show_default=False,
            help="Folder for the event file. Default: the output folder of the training, as the "
            "ranks tell it.",
        ),
    ] = "",
    keep_logs: Annotated[
        int,
        typer.Option(
            "--keep-logs",
            min=0,
            metavar="N",
            help="Keep the logs of so many earlier starts, in the folder earlier/ beside the logs "
            "of msrun, which each start overwrites. 0: none.",
        ),
    ] = 5,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Keep a process that has imported mindspore and mindformers: the next start forks "
            "its ranks. It needs the memory of one more rank that has not begun.",
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=1,
            max=65535,
            metavar="P",
            envvar="MSRUN_METRICS_PORT",
            help="Answer Prometheus on this port, with the numbers of this node and of rank 0.",
        ),
    ] = None,
    metrics_textfile: Annotated[
        str,
        typer.Option(
            "--metrics-textfile",
            metavar="DIR",
            envvar="MINDRESUME_METRICS_TEXTFILE",
            show_default=False,
            help="Write these numbers into files of DIR, the folder of node_exporter's textfile "
            "collector; rank 0 does, too.",
        ),
    ] = "",
    notify_url: Annotated[
        str,
        _notify(
            "url",
            "URL",
            "Post what happens to this webhook. It is a secret, and lists of processes show it: "
            "the variable is better.",
        ),
    ] = "",
    notify_format: Annotated[
        str, _notify("format", "FORMAT", "json, feishu, dingtalk, wecom or slack.", ", else json")
    ] = "json",
    notify_events: Annotated[
        str,
        _notify(
            "events",
            "A,B",
            "Kinds of events that are posted, with commas between them.",
            ", else failures, restarts and the end",
        ),
    ] = "",
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print what happens as JSON lines on standard output; the command prints to "
            "standard error.",
        ),
    ] = False,
) -> None:
    """Starts a training, and starts it again when a rank has died or hangs.

    [bold]mindresume run -- bash scripts/msrun_launcher.sh
    "run_mindformer.py --config qwen3.yaml" 8[/bold]

    [bold]mindresume run --hang-timeout 600 -- msrun --worker_num=8 ... run_mindformer.py ...
    --register_path "$(mindresume plugin-path)"[/bold]

    The command must be one that resumes when it is started again (load_checkpoint and
    resume_training, or a fresh start in the folder that it saves to).

    A dead rank is noticed at once, by its process; a hang by the heartbeats that mindresume writes
    in each rank: the stacks of all ranks are then written beside the event file. Everything that is
    left of the job is ended, and the command starts again: at once if the job had made progress,
    else after 1, 2, 4 ... 60 seconds. A job that makes no progress is given up, and the log says
    what each start did and died of.

    With several nodes, --rendezvous makes all of them start, end and restart together. COMMAND may
    contain {nodes}, {node_rank}, {workers} and {master_addr}: the numbers of the nodes that take
    part, which change with --min-nodes.

    [bold]mindresume run --nodes 2 --node-rank 1 --rendezvous /shared/job7/supervisor --
    bash scripts/msrun_launcher.sh "run_mindformer.py ..." {workers} 8 {master_addr} 8118
    {node_rank} output/msrun_log False 7200[/bold]

    No restart follows status 0 (the training is done), 2 (a wrong argument or setting), 65 (the
    weights are not those that were loaded), 66 (a step that was trained again differs) or 68 (the
    guard stopped at a bad step), SIGTERM (the ranks save; status 143) or Ctrl-C (130). If memory of
    this node then has a newer save than the disk (memory_tier), it is written to disk.

    Exit status: the job's, 128 + N if signal N ended it, 124 after a hang.
    """
    from mindresume.coordination.liveness import AwakeClock
    from mindresume.storage.posix import PosixStorage
    from mindresume.supervisor.evidence import BackgroundHandler
    from mindresume.supervisor.hang import JobSettings
    from mindresume.supervisor.job_end import job_key
    from mindresume.supervisor.node_metrics import NodeMetrics
    from mindresume.supervisor.notify import notifier
    from mindresume.supervisor.rendezvous import BackgroundStates, Place, Rendezvous
    from mindresume.supervisor.slow import Slowness
    from mindresume.supervisor.supervisor import Supervisor, SupervisorSettings

    if command[:1] == ["--"]:
        command = command[1:]
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0] if command else 'COMMAND'}: there is no such command; give it after --, "
            "for example: mindresume run -- bash scripts/msrun_launcher.sh ..."
        )
    job = JobSettings(
        hang_timeout,
        start_timeout,
        kill_after,
        save_timeout,
        _seconds(leave, 60.0, "MSRUN_LEAVE", "MSRUN_GRACE"),
        _seconds(stuck, 60.0, "MSRUN_STUCK"),
    )
    settings = SupervisorSettings(
        max_restarts, job, events, json, local_workers, keep_logs, standby
    )
    meeting = None
    if nodes > 1:
        if rendezvous is None:
            raise ConfigError(
                f"--nodes {nodes}: --rendezvous DIR is missing. Give the same folder on every "
                "node: on a disk that all nodes see, of this job alone, for example --rendezvous "
                "/shared/JOB/supervisor. None is assumed, because only a folder in which the nodes "
                "have met is known to be shared"
            )
        if (
            min_nodes is not None
            and min_nodes < nodes
            and not any("{node_rank}" in word for word in command)
        ):
            raise ConfigError(
                "--min-nodes: the command must change with the nodes that take part; write {nodes} "
                "or {workers}, {node_rank} and {master_addr} into it"
            )
        place = Place(
            node_rank, nodes, min_nodes or nodes, node_timeout, node_address or _own_address()
        )
        meeting = Rendezvous(
            PosixStorage(),
            os.path.abspath(rendezvous),
            place,
            AwakeClock(),
            states=BackgroundStates,
        )
    printed = BackgroundHandler(_JsonLines() if json else _Lines())
    emit = Emitter(printed)
    if notify_url:
        os.environ.pop("MSRUN_NOTIFY_URL", None)  # the ranks need no secret
        # closed before the other, which prints its last warning
        emit = Emitter(notifier(notify_url, notify_format, notify_events, node_rank, emit), printed)
    watchers = [Slowness(slow_factor, emit).watch] if slow_factor else []
    if metrics_port or metrics_textfile:
        if not metrics_textfile:  # the port answers with what rank 0 writes there
            metrics_textfile = tempfile.mkdtemp(prefix="mindresume-metrics-")
            runtime.at_exit(shutil.rmtree, metrics_textfile, ignore_errors=True)
        own = f"{os.path.basename(os.getcwd())}-{job_key(command)[:6]}"
        training = os.environ.setdefault("MINDRESUME_METRICS_TRAINING", own)
        os.environ["MINDRESUME_METRICS_TEXTFILE"] = os.path.abspath(metrics_textfile)
        metrics = NodeMetrics(metrics_textfile, training, emit, node_rank)
        if metrics_port:
            metrics.serve(metrics_port)
        emit.add(metrics)
        watchers.append(metrics.watch)
    sys.exit(Supervisor(command, settings, emit, meeting, _flush_memory, watchers).run())


def _flush_memory(output: str, hurry: Hurry) -> Event | None:
    """Writes what is newer in memory of this node to disk: it is not known whether a start on this
    node follows."""
    from mindresume.api import maintenance

    try:
        found = maintenance.flush(output, progress=_StopsInHurry(hurry))
    except (MindResumeError, OSError) as error:
        return (
            None
            if isinstance(error, FileNotFoundError)
            else warning(
                f"what memory of this node has was not written to disk: {error}; mindresume flush "
                f"{output} does it"
            )
        )
    if found.step is None:
        return None
    return Notice(
        f"step {found.step} was in memory only and is on disk now"
        + ("" if found.committed else "; it counts once the other nodes have written their parts")
    )


class _StopsInHurry(Progress):
    """Receives the progress of writing; nobody watches it."""

    def __init__(self, hurry: Hurry):
        self.hurry = hurry

    def advance(self, count: int) -> None:
        if self.hurry.is_hurried():
            raise InterruptedError("stopped by a second signal")


def _own_address() -> str:
    """Returns the address of this host by its name; the name if it has none."""
    name = runtime.gethostname()
    try:
        return runtime.gethostbyname(name)
    except OSError:
        return name


def _seconds(given: float | None, default: float, *variables: str) -> float:
    """Returns the option, else the first of the environment variables that is set, else the
    default."""
    if given is not None:
        return given
    for name in variables:
        if value := os.environ.get(name):
            if not value.isdigit():
                raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
            return float(value)
    return default


class _Lines(Handler):
    """Prints the log line of each event to standard error: the command prints to standard
    output."""

    def handle(self, event: Event, time_s: float) -> None:
        if text := event.line():
            say(f"{PREFIX}{text}", error=True)
            sys.stderr.flush()


class _JsonLines(Handler):
    """Prints each event as one JSON line."""

    def handle(self, event: Event, time_s: float) -> None:
        print(json_module.dumps({"time": round(time_s, 3), **event.to_json()}), flush=True)


# ---- plugin-path ---------------------------------------------------------------------------------


@app.command("plugin-path")
def plugin_path() -> None:
    """Prints the folder for `--register_path` of mindformers' own run_mindformer.py.

    The YAML file then needs one more line, in the `trainer:` block: `auto_register:
    mindresume_plugin.MindResume`.
    """
    print(Path(__file__).resolve().parent.parent / "mindformers" / "shim")

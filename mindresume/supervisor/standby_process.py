"""The standby process of a node: it has imported mindspore and mindformers, and waits.

    python standby_process.py FOLDER        # started by supervisor.standby, in the environment of
                                            # the training's own msrun

    standby_client ──arguments, environment, descriptors──▶ standby process ──fork──▶ msrun
    msrun ──fork──▶ scheduler, rank 0, rank 1 ...

What is forked has the imports already and shares their memory. msrun is forked, too, so that ranks
are its children as always: their exit statuses, signals and logs take no other way. It speaks with
its client itself, so it does not need the standby process any more. A fork shows the environment of
its rank in ``/proc/PID/environ``, by which launchers find processes.

A fork has only the thread that forks. Of the others that are there after the imports OpenBLAS and
jemalloc start theirs again (``pthread_atfork``); with any other nothing is forked.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import standby_client as client

TAKEN = "taken.json"
# what is imported, in this order; the last ones can be absent
MODULES = ("mindspore", "mindspore.parallel.cluster.run", "mindformers", "mindformers.trainer")
OURS = ("mindresume.mindformers.installation", "mindresume.mindformers.checkpoint_monitor")
_SHARE = 0.25  # of a core, for the imports
# Variables that may differ between the first start and a later one. The others can be read while
# something is imported; these of MindSpore are not.
_OWN = ("MINDRESUME_SUPERVISOR", "MSRUN_LAUNCHER_", "MS_COMPILER_CACHE_", "MS_RETRY_INTERVAL_")
_SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}
# set by msrun for each rank
RANKS = (
    "RANK_ID RANK_SIZE DEVICE_ID MS_ROLE MS_NODE_ID MS_WORKER_NUM MS_SCHED_HOST MS_SCHED_PORT "
    "MS_TOPO_TIMEOUT"
)
# With these, MindSpore opens the log of a rank, or begins to profile, while it is imported.
_EARLY = ("GLOG_log_dir", "MS_PROFILER_OPTIONS", "MS_SIMULATION_LEVEL")
# What mindformers reads of them while it is imported: module, class, attribute or parameter,
# variable and default.
_READ = (
    ("mindformers.core.config_args", "ContextConfig", "device_id", "DEVICE_ID", 0),
    ("mindformers.core.config_args", "ParallelContextConfig", "device_num", "RANK_SIZE", 1),
    ("mindformers.trainer.training_args", "TrainingArguments", "device_id", "DEVICE_ID", 0),
    ("mindformers.trainer.training_args", "TrainingArguments", "device_num", "RANK_SIZE", 1),
    ("mindformers.trainer.training_args", "TrainingArguments", "rank_id", "RANK_ID", 0),
)
_DEVICES = ("/dev/davinci", "/dev/devmm", "/dev/hisi")  # of Ascend
_LOGGER = "mindformers.tools.logger"
_SPARE = 1 << 12  # bytes by which the environment of a rank is longer than that of msrun
_LIBC = ctypes.CDLL(None, use_errno=True)
_CALL_SECONDS = 10.0  # in which a client sends its call


class Refused(SystemExit):
    """A start cannot be taken over; its text says why."""


class Become(BaseException):
    """Leaves all frames of a forked process, which then goes on with ``main`` at the bottom of its
    stack: what was being done belongs to its parent. Its argument is ``main``."""


def as_itself(main: Callable[[], None]) -> None:
    """Calls ``main``, then what forked processes become."""
    while True:
        try:
            main()
            return
        except Become as become:
            main = become.args[0]


# ---- the environment of a fork -------------------------------------------------------------------

# fields of /proc/self/stat: arg_start and env_start, each followed by its end, see proc(5)
_ARGUMENTS, _ENVIRONMENT = 48, 50


def _block(first: int) -> tuple[int, int]:
    """Returns address and length of the memory that the kernel shows as arguments or environment of
    this process."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[first - 3]), int(fields[first - 2])
    return begin, end - begin


def _show(first: int, words: Sequence[str]) -> None:
    begin, size = _block(first)
    if begin:
        data = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memmove(begin, data[:size].ljust(size, b"\0"), size)


def _pairs(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def take_environment(environment: Mapping[str, str]) -> None:
    """Makes an environment that of this process, also for those who read it from outside."""
    os.environ.clear()
    os.environ.update(environment)
    # since then no pointer of the C library leads into the block that the kernel shows
    _show(_ENVIRONMENT, _pairs(environment))


def require_same(call: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises Refused if a call differs from that of the first start in what a fork cannot take
    over: mindspore and other libraries read variables while they are imported."""
    for what, part in (("variables", "environment"), ("properties of the process", "inherited")):
        mine, theirs = call[part], other[part]
        changed = sorted(
            name
            for name in mine.keys() | theirs.keys()
            if mine.get(name) != theirs.get(name)
            and name not in _SHELL
            and not name.startswith(_OWN)
        )
        if changed:
            raise Refused(f"other {what} than the standby process: {', '.join(changed[:5])}")
    script = script_of(other)[0]
    if script != script_of(call)[0] or call["cwd"] != other["cwd"]:
        raise Refused(f"another script or folder: {script} in {other['cwd']}")
    with open(other["argv"][0], "rb") as file:
        if b"mindspore.parallel.cluster.run" not in file.read(1 << 12):
            raise Refused(f"{other['argv'][0]} is not the msrun of mindspore")
    size = sum(len(os.fsencode(pair)) + 1 for pair in _pairs(other["environment"]))
    if size + _SPARE > _block(_ENVIRONMENT)[1]:
        raise Refused("the environment is longer than before")


# ---- forks ---------------------------------------------------------------------------------------


def fork() -> int:
    """Forks. In the child, signals and random numbers are those of a new process."""
    sys.stdout.flush()
    sys.stderr.flush()
    _LIBC.fflush(None)
    if pid := os.fork():
        return pid
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    return 0


class Fork(subprocess.Popen[bytes]):
    """A forked process."""

    def __init__(self, pid: int, args: Sequence[str]):
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        # of CPython: the lock of poll and wait, and whether __del__ looks after the process
        self._waitpid_lock, self._child_created = threading.Lock(), True


def start_rank(args: Sequence[str], **options: Any) -> Any:
    """Takes the place of ``subprocess.Popen`` in msrun: what runs a Python script is forked."""
    is_known = "stdout" in options and options.keys() <= {"preexec_fn", "stdout", "stderr"}
    if not (is_known and args[0] == "python" and args[1].endswith(".py")):
        if not args[0].endswith("tail"):  # such as numactl before the script
            print("mindresume: an ordinary start of", *args[:3], file=sys.stderr)
        return subprocess.Popen(args, **options)
    if pid := fork():
        return Fork(pid, args)
    if preexec := options.get("preexec_fn"):
        preexec()
    os.dup2(options["stdout"].fileno(), 1)
    os.dup2(1, 2)
    take_environment(dict(os.environ))
    raise Become(lambda: run_script(args[1:]))


def run_script(words: Sequence[str]) -> None:
    """Runs a script as ``python SCRIPT ...`` does."""
    take_rank()
    close_others()
    sys.argv = list(words)
    sys.orig_argv = ["python", *words]
    _show(_ARGUMENTS, sys.orig_argv)
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    path = os.path.abspath(words[0])
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102


def take_rank() -> None:
    """Sets what the framework would have read from the environment of this rank while it was
    imported."""
    context = sys.modules.get("mindspore.context")
    if hasattr(context, "_context"):
        device = int(os.environ.get("DEVICE_ID", 0))
        context._context().set_param(context.ms_ctx_param.device_id, device)
    for module, name, attribute, variable, default in _READ:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is None:
            continue
        value = int(os.environ.get(variable, default))
        if hasattr(kind, attribute):
            setattr(kind, attribute, value)
        function = kind.__init__
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        if attribute in parameters:
            defaults = list(function.__defaults__)
            defaults[parameters.index(attribute) - len(parameters)] = value
            function.__defaults__ = tuple(defaults)
    # mindformers opens its log files anew: their folder has the number of the rank
    logs = sys.modules.get(_LOGGER)
    for name in getattr(logs, "logger_list", ()):
        logger = import_module("logging").getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
    if logs is not None:
        logs.logger_list.clear()


_kept: set[int] = set()  # descriptors that libraries opened while they were imported


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def close_others() -> None:
    """Closes what a new process would not have."""
    for number in _descriptors().keys() - _kept - {0, 1, 2}:
        os.close(number)


def run_msrun(call: Mapping[str, Any], connection: socket.socket) -> None:
    """Runs mindspore's msrun, whose processes are forked."""
    api = import_module("mindspore.parallel.cluster.process_entity._api")
    api.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": start_rank})
    sys.argv = list(call["argv"])
    _show(_ARGUMENTS, ["python", *sys.argv])
    status: Any
    try:
        sys.exit(import_module("mindspore.parallel.cluster.run").main())
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    _say(connection, status=status)
    os._exit(status)


# ---- calls ---------------------------------------------------------------------------------------


def script_of(call: Mapping[str, Any]) -> list[str]:
    """Returns the script that msrun is to start, and its arguments."""
    words = call["argv"][1:]
    return words[next((at for at, word in enumerate(words) if word.endswith(".py")), 0) :]


def sources() -> dict[str, int]:
    """Returns when each file that was imported was changed: a new process would read it again."""
    files = (getattr(it, "__dict__", {}).get("__file__") for it in list(sys.modules.values()))
    return {path: os.stat(path).st_mtime_ns for path in files if path}


def serve(folder: str, first: Mapping[str, Any]) -> None:
    """Serves one start after the other; ``first``: the call of the one that was an ordinary one."""
    imported = sources()
    path = os.path.join(folder, client.SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    place = os.open(folder, os.O_PATH)
    listener.bind(f"/proc/self/fd/{place}/{client.SOCKET}.new")
    os.close(place)
    listener.listen()
    os.replace(path + ".new", path)
    # the kernel reaps msrun, which speaks with its client itself
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        descriptors: list[int] = []
        # a client that has gone, or says nothing
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            try:
                connection.settimeout(_CALL_SECONDS)
                # 0, 1, 2, and a pipe whose other end is open as long as the client lives
                descriptors = socket.recv_fds(connection, 1, 4)[1]
                call = json.loads(connection.makefile("rb").readline())
                require_same(first, call)
                if imported != sources():
                    raise Refused("a module was changed after it was imported")
                if fork() == 0:
                    become_msrun(call, descriptors, connection)
            except Refused as refused:
                _say(connection, refused=str(refused))
            finally:
                for number in descriptors:
                    os.close(number)


def become_msrun(
    call: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket
) -> NoReturn:
    """Makes this fork msrun, with what the client has sent. Raises Become."""
    try:
        os.setsid()
        for number in range(3):
            os.dup2(descriptors[number], number)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
        with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write(call["inherited"]["oom_score_adj"])
        os.chdir(call["cwd"])
        take_environment(call["environment"])
        if not dies_with(os.dup(descriptors[3])):
            os._exit(1)
        _say(connection, pid=os.getpid())
    except BaseException as error:  # this process must not go on as the server
        with contextlib.suppress(OSError):
            _say(connection, refused=f"the standby process: {error}")
        os._exit(1)
    mine = socket.socket(fileno=os.dup(connection.fileno()))
    raise Become(lambda: run_msrun(call, mine))


def dies_with(pipe: int) -> bool:
    """Makes the kernel kill this process when the other end of ``pipe`` is closed. Returns whether
    it is open.

    A launcher kills msrun so that it does not kill its other ranks when one ends: that must reach
    the real msrun in the same moment as the client.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    end = select.poll()  # select() knows no descriptor over 1023
    end.register(pipe, select.POLLIN)
    return not end.poll(0)


def _say(connection: socket.socket, **values: Any) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


# ---- imports -------------------------------------------------------------------------------------


def pause(name: str, path: Any, target: Any = None) -> None:
    """Is asked for each module that is imported: lets the training go first. (A low priority could
    not be raised again, and the ranks would inherit it.)"""
    time.sleep(max(0.0, time.process_time() / _SHARE - (time.monotonic() - _began)))


_began = time.monotonic()


def import_all() -> None:
    """Imports what a training needs. SystemExit if a fork of this process would not be as a new
    process."""
    for name in _EARLY:
        if os.environ.get(name):
            raise SystemExit(f"{name} is set, which is read while mindspore is imported")
    readers: set[str] = set()
    environment = type(os.environ)
    get = environment.__getitem__

    def watched(self: Any, name: str) -> str:
        if name in RANKS.split():
            frame: Any = sys._getframe(1)
            while frame and frame.f_code.co_name != "<module>":
                frame = None if frame.f_globals["__name__"] == _LOGGER else frame.f_back
            readers.update([frame.f_globals["__name__"]] if frame else [])
        return get(self, name)

    environment.__getitem__ = watched  # type: ignore[method-assign]
    finder: Any = types.SimpleNamespace(find_spec=pause)
    sys.meta_path.insert(0, finder)
    import_module("numpy")
    threads = len(os.listdir("/proc/self/task"))  # those of OpenBLAS
    for name in MODULES:
        import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        for name in OURS:
            import_module(name)
    environment.__getitem__ = get  # type: ignore[method-assign]
    sys.meta_path.remove(finder)
    if unknown := readers - {row[0] for row in _READ}:
        raise SystemExit(f"{', '.join(sorted(unknown))} read a rank's variables when imported")
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            threads -= file.read().strip() != "jemalloc_bg_thd"
    if threads < 0:
        raise SystemExit("threads run after the imports, which a fork would not have")
    opened = _descriptors()
    if devices := [path for path in opened.values() if path.startswith(_DEVICES)]:
        raise SystemExit(f"{devices[0]} was opened by an import")
    _kept.update(opened)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all objects


def main(folder: str) -> None:
    """Imports what a training needs, then serves."""
    with open(os.path.join(folder, TAKEN), encoding="utf-8") as file:
        call = json.load(file)
    with open(os.path.join(folder, "standby.log"), "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=False)
    os.umask(int(call["inherited"]["Umask"][0], 8))
    for name, limits in call["inherited"]["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    mine = json.loads(json.dumps({**call, "inherited": client.inherited()}))
    require_same(mine, call)
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")  # rather this process than a rank; a process may lower what it raised
    os.environ["LOG_MF_PATH"] = folder  # of this process alone
    # mindspore notes the script when it is imported, to know whether a kept graph is of its source
    sys.argv = script_of(call)
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    import_all()
    serve(folder, mine)


if __name__ == "__main__":
    as_itself(lambda: main(sys.argv[1]))

"""``mindresume run`` with metrics: what is refused, and what the ranks get."""

import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


def run(folder, *options, command=("true",), **environment):
    return subprocess.run(
        [sys.executable, "-m", "mindresume", "run", *options, "--", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((os.getcwd(), *sys.path)), **environment},
        capture_output=True,
        text=True,
    )


def test_the_ranks_get_the_folder_and_the_name_of_the_training(tmp_path):
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    command = (sys.executable, "-c", program)
    done = run(tmp_path, "--metrics-textfile", ".", command=command)
    given = json.loads(done.stdout)
    (file,) = tmp_path.glob("*.prom")
    assert given["MINDRESUME_METRICS_TEXTFILE"] == str(tmp_path)
    assert f'training="{given["MINDRESUME_METRICS_TRAINING"]}"' in file.read_text()
    own = {"MINDRESUME_METRICS_TEXTFILE": str(tmp_path), "MINDRESUME_METRICS_TRAINING": "7b"}
    assert json.loads(run(tmp_path, command=command, **own).stdout).items() >= own.items()
    assert len([*tmp_path.glob("*.prom")]) == 2


def test_with_a_port_alone_nothing_is_left(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run(
        tmp_path,
        command=("sh", "-c", "ls $MINDRESUME_METRICS_TEXTFILE"),
        MSRUN_METRICS_PORT=str(port),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0 and "node_0.prom" in done.stdout and os.listdir(tmp_path) == []


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_wrong_port_is_refused(tmp_path, port):
    done = run(tmp_path, MSRUN_METRICS_PORT=port)
    assert done.returncode == 2 and "MSRUN_METRICS_PORT" in done.stderr


def test_a_port_in_use_and_a_missing_folder_are_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(tmp_path, "--metrics-port", port)
    assert done.returncode == 2 and port in done.stderr
    done = run(tmp_path, "--metrics-textfile", "missing")
    assert done.returncode == 2 and "missing" in done.stderr

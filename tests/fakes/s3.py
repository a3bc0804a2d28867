"""An S3 server on this machine: moto, in a process of its own, without delays and without lost
writes.

from fakes.s3 import s3_server  # a fixture: the URL of the server, once for all tests of a process
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEADLINE = 60.0  # seconds until the server must answer
BUCKET = "bucket"


def environment(url: str) -> dict[str, str]:
    """Returns the variables with which any program of AWS, and s3fs, uses the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@contextmanager
def serve() -> Iterator[str]:
    """Starts a server with one empty bucket. Yields its URL."""
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            yield _ready(server, output)
        finally:
            server.kill()
            server.wait()


def _ready(server: subprocess.Popen, output) -> str:
    until, text = time.monotonic() + DEADLINE, ""
    while time.monotonic() < until and server.poll() is None:
        output.seek(0)
        found = re.search(r"Running on (http://[\d.:]+)", text := output.read())
        if found:
            request = urllib.request.Request(f"{found[1]}/{BUCKET}", method="PUT")
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                assert answer.status == 200
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"moto did not start within {DEADLINE:.0f} s:\n{text}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with serve() as url:
        yield url

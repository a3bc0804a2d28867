"""Sends signals to this process from another one."""

import subprocess


def from_outside(*options):
    """Sends SIGTERM, after ``Popen`` has returned: until its child runs the program, it blocks the
    signals of its thread."""
    with subprocess.Popen(
        ["sh", "-c", f"read go; /bin/kill -TERM {' '.join(options)} $PPID"], stdin=subprocess.PIPE
    ) as sender:
        sender.communicate(b"go\n")
    assert sender.returncode == 0

"""Partner copies: how fast a save in memory goes to another node, and what that costs a step.

    python benchmarks/partner.py [--mib 256] [--ranks 2] [--rounds 7] [--json FILE]
    python benchmarks/partner.py --steps [--rounds 20] [--seconds 3]

plain         the same bytes, from files in memory over one TCP connection into files in memory, by
              two processes that do nothing else
copy          mindresume.saving.memory_tier.partner: the same, with checksums, records and the
              handshake, without the limit of its rate; target 1.43 of it (0.7 of its bytes a
              second)

--steps: how much longer a step of the quickstart's training takes on two nodes of one rank with
``every_steps: 10, partner: true`` than with ``every_steps: 10`` alone; target 2 % (needs root)
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure as measure
import _tier_steps

from mindresume.coordination.channel import Endpoint, connect, listen
from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import FileName
from mindresume.formats.records import scan_records
from mindresume.model.training_state import TrainingState
from mindresume.saving.memory_tier.partner import Keeper, push
from mindresume.saving.shard_writer import SaveTarget, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage

STORAGE = PosixStorage()
RUN = "0001-00000000"
CHUNK = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default=None)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--serve", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve[0]](Path(options.serve[1]))
        return
    memory = Path(tempfile.mkdtemp(prefix="bench-partner-", dir="/dev/shm"))
    try:
        if options.steps:
            steps(str(memory), options)
        else:
            copies(memory, options)
    finally:
        for path in memory.parent.glob(f"{memory.name}*"):
            shutil.rmtree(path)


def steps(memory: str, options: argparse.Namespace) -> None:
    tier = {"CPU_CLUSTER_MEMORIES": "2", "MINDRESUME_MEMORY_TIER_EVERY_STEPS": "10"}
    kinds = {
        "tier alone": tier,
        "partner": {**tier, "MINDRESUME_MEMORY_TIER_PARTNER": "true"},
    }
    with tempfile.TemporaryDirectory() as folder:
        found = _tier_steps.measure_steps(folder, memory, 2, options.rounds, options.seconds, kinds)
        measure.finish(
            f"Step time with partner copies, 2 nodes of one rank, {options.rounds} rounds",
            folder,
            found,
            _tier_steps.text(found, *kinds, target=2),
            options.json,
        )


# ---- copies --------------------------------------------------------------------------------------


def copies(memory: Path, options: argparse.Namespace) -> None:
    source = CheckpointDir(STORAGE, str(memory / "source"))
    for rank in range(options.ranks):
        target = SaveTarget(STORAGE, source.root, RUN, rank, options.ranks, lineage=RUN)
        name = FileName("net", rank, 0, 1, 10, "safetensors")
        state = TrainingState(10, 1000, 10)
        write_shard(target, rank_shard(name, state, measure.arrays(options.mib)))
    (candidate,) = scan_records(source)[0]
    size = sum(file.size or 0 for file in candidate.all_files)
    rounds = measure.Rounds()
    servers = {kind: Server(kind, memory / kind) for kind in SERVERS}
    try:
        for number in rounds.numbers(options.rounds):
            works: list[Callable[[], Any]] = [
                lambda: send_plainly(servers["plain"], source, candidate),
                lambda: send(servers["copy"], source, candidate),
            ]
            for kind in SERVERS:
                shutil.rmtree(memory / kind, ignore_errors=True)
                (memory / kind).mkdir()
            for kind, work in measure.shuffled([*zip(SERVERS, works, strict=True)], number):
                rounds.timed(kind, work)
    finally:
        for server in servers.values():
            server.process.kill()
    ratio = rounds.ratio("copy", "plain")
    rows = [
        [kind, f"{rounds.median(kind):.3f}", f"{size / rounds.median(kind) / 2**20:.0f}"]
        for kind in SERVERS
    ]
    measure.finish(
        f"Partner copies, {size / 2**20:.0f} MiB in {options.ranks} files, {options.rounds} rounds",
        str(memory),
        rounds,
        measure.table(["what", "median s", "MiB/s"], rows)
        + f"\nbytes a second, copy / plain: {1 / ratio:.2f} (times in the rounds: "
        f"{rounds.spread('copy', 'plain')}); target 0.7: {'met' if ratio <= 1 / 0.7 else 'missed'}"
        "\n",
        options.json,
        {"bytes": size},
    )


class Server:
    """A process that receives, in ``folder``. ``endpoint``: what it printed."""

    def __init__(self, kind: str, folder: Path):
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, str(folder)], stdout=subprocess.PIPE
        )
        host, port, secret = self.process.stdout.readline().decode().split()
        self.endpoint = Endpoint(host, int(port), secret)


def serve(folder: Path) -> None:
    keeper = Keeper(CheckpointDir(STORAGE, str(folder)), keeps_last=True)
    print(*listen(keeper.serve).endpoint, flush=True)
    threading.Event().wait()


def send(server: Server, source: CheckpointDir, candidate: Any) -> None:
    channel = connect(server.endpoint)
    push(channel, source, candidate)
    channel.close()


def serve_plainly(folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print("127.0.0.1", listener.getsockname()[1], "-", flush=True)
    buffer = memoryview(bytearray(CHUNK))
    while True:
        connection, _ = listener.accept()
        number = 0
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            with open(folder / str(number), "wb", buffering=0) as file:
                while left:
                    size = connection.recv_into(buffer[: min(left, CHUNK)])
                    file.write(buffer[:size])
                    left -= size
            number += 1
            connection.sendall(b"1")
        connection.close()


def send_plainly(server: Server, source: CheckpointDir, candidate: Any) -> None:
    with socket.create_connection(server.endpoint[:2]) as connection:
        for file in candidate.all_files:
            connection.sendall(file.size.to_bytes(8, "big"))
            with open(source.path(file.path), "rb", buffering=0) as opened:
                while piece := opened.read(CHUNK):
                    connection.sendall(piece)
            connection.recv(1)


SERVERS = {"plain": serve_plainly, "copy": serve}


if __name__ == "__main__":
    main()

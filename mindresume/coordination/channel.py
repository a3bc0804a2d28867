"""Connections between the nodes of a job, for bytes that no collective shall carry.

    listener = listen(serve)                # a daemon thread; serve(channel) for each connection
    channel = connect(listener.endpoint)    # another process, which was told the endpoint
    channel.send(b"...");  channel.receive(3)

An endpoint holds a secret of its own, and travels by the job's own exchange. Both ends prove with
it (HMAC-SHA256 of two nonces) that they know it before anything else is read. Bytes are neither
encrypted nor signed. Every operation has a deadline, and a process serves few connections at once:
who connects without the secret can keep others out for some seconds, and learns nothing.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from mindresume import runtime
from mindresume.typed import Count

DEADLINE = 30.0  # seconds of one operation
_HANDSHAKE = 10.0  # seconds, of the connection and of each message before both ends are known
_MOST = 2  # connections at once
_PROOF = hashlib.sha256().digest_size


class Endpoint(NamedTuple):
    """Where a process listens, and the secret of who may connect, in hex."""

    host: str
    port: Count
    secret: str


class Channel(Protocol):
    """One end of a connection. All errors are OSError."""

    def send(self, data: bytes | memoryview) -> None: ...

    def receive(self, count: int) -> memoryview:
        """Returns the next ``count`` bytes, in memory that the next call overwrites."""

    def close(self) -> None: ...


class Listener(Protocol):
    """A process that listens."""

    endpoint: Endpoint

    def close(self) -> None:
        """Takes no connection any more, and ends those that there are. Raises no error."""


class SocketChannel:
    """A channel through a TCP socket."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._buffer = bytearray()
        self._until: float | None = None  # of the handshake

    def send(self, data: bytes | memoryview) -> None:
        self._socket.sendall(data)

    def receive(self, count: int) -> memoryview:
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        found = memoryview(self._buffer)[:count]
        done = 0
        while done < count:
            if self._until is not None:
                self._socket.settimeout(max(self._until - runtime.monotonic(), 0.001))
            size = self._socket.recv_into(found[done:])
            if not size:
                raise ConnectionResetError("the other end has closed the connection")
            done += size
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._socket.close()

    def handshake(self, secret: str, is_caller: bool) -> None:
        """Proves to the other end that this one knows the secret, and has it do the same. Raises
        OSError."""
        self._until = runtime.monotonic() + _HANDSHAKE
        self._socket.settimeout(_HANDSHAKE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = os.urandom(_PROOF)
        self.send(own)
        other = bytes(self.receive(_PROOF))
        nonces = own + other if is_caller else other + own

        def proof(of_caller: bool) -> bytes:
            return hmac.digest(bytes.fromhex(secret), bytes([of_caller]) + nonces, "sha256")

        if is_caller:
            self.send(proof(True))
        if not hmac.compare_digest(proof(not is_caller), self.receive(_PROOF)):
            raise PermissionError("the other end does not know the secret of this job")
        if not is_caller:
            self.send(proof(False))
        self._until = None
        self._socket.settimeout(DEADLINE)


class SocketListener:
    """Listens on the address by which the other nodes know this one. ``serve``: is called in a
    thread for each connection whose other end knows the secret."""

    def __init__(self, serve: Callable[[Channel], None], port: int):
        host, family = own_address()
        self._serve = serve
        self._busy: list[socket.socket] = []
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_MOST)
            self.endpoint = Endpoint(host, self._socket.getsockname()[1], runtime.token_hex(32))
            # a worker of the data set that outlives this process would keep the port
            os.register_at_fork(after_in_child=self._socket.close)
            runtime.Thread(target=self._accept, name="mindresume-listener", daemon=True).start()
        except RuntimeError as error:  # the limit of threads is reached
            self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        for connection in tuple(self._busy):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                if self._socket.fileno() < 0:
                    return
                runtime.sleep(1.0)  # no file handle is left, for one
                continue
            if len(self._busy) >= _MOST:
                connection.close()
                continue
            self._busy.append(connection)
            try:
                runtime.Thread(
                    target=self._talk, args=(connection,), name="mindresume-channel", daemon=True
                ).start()
            except RuntimeError:  # the limit of threads is reached
                self._end(connection)

    def _talk(self, connection: socket.socket) -> None:
        channel = SocketChannel(connection)
        try:
            channel.handshake(self.endpoint.secret, is_caller=False)
            self._serve(channel)
        except OSError:
            pass  # the other end learns it, too
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._busy.remove(connection)
        connection.close()


@runtime.asks_machine
def listen(serve: Callable[[Channel], None], port: int = 0) -> Listener:
    """Listens for other processes of the job. ``port``: 0: a free one. Raises OSError."""
    return SocketListener(serve, port)


@runtime.asks_machine
def connect(endpoint: Endpoint) -> Channel:
    """Connects to a process that listens. Raises OSError."""
    connection = socket.create_connection(endpoint[:2], _HANDSHAKE)
    channel = SocketChannel(connection)
    try:
        channel.handshake(endpoint.secret, is_caller=True)
    except BaseException:
        channel.close()
        raise
    return channel


def own_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the address of this host on the way to the job's scheduler, by which the nodes know
    each other, and its family. Nothing is sent. Raises OSError."""
    host = environment.get("MS_SCHED_HOST") or runtime.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0], family


_LENGTH = struct.Struct(">I")


def send_message(channel: Channel, message: bytes) -> None:
    """Sends a message with its length before it."""
    channel.send(_LENGTH.pack(len(message)) + message)


def receive_message(channel: Channel, limit: int) -> bytes:
    """Returns the next message. Raises OSError, also if it has more than ``limit`` bytes."""
    (count,) = _LENGTH.unpack(channel.receive(_LENGTH.size))
    if count > limit:
        raise ConnectionError(f"a message of {count} bytes, expected at most {limit}")
    return bytes(channel.receive(count))

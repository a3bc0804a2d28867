"""Copies of what one node saves in memory, in the memory of another node, its partner.

    {tier}.partner/         what this node keeps for another one: a tier like its own

    ring = Ring(nodes, offset)                          # on all ranks
    keeper = Keeper(kept, keeps_last=True);  door = listen(keeper.serve)    # the first of each node
    copies = Copies(tier, ring.partner's endpoint, emit);  copies.offer(step)
    push(channel, tier, candidate)                      # one save, to any ``Keeper``

The first process of each node sends a save once all ranks of its node have recorded it, in a
thread, as slowly as half of the time between two saves allows. A save that the training overwrites
meanwhile is given up: the receiver compares the checksums of each file with those in the record,
which comes last. So a copy that has a record is what was saved.

What is kept: the newest whole copy and the one that is received. All nodes have a common step as
long as a copy takes less than the time between two saves. If a node is lost, the next start has it
pushed back, into the tier of the node that needs it (``mindresume.resume.memory_source``).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from xxhash import xxh3_128

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.coordination.channel import (
    DEADLINE,
    Channel,
    Door,
    Endpoint,
    connect,
    receive_message,
    send_message,
)
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import MindResumeError, RecordError, SaveError
from mindresume.events import Emit, Notice, PartnerCopied, PartnerCopyFailed
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.formats.weight_files import is_as_recorded
from mindresume.formatting import listed, size_text
from mindresume.model.manifest import (
    FORMATS,
    MAX_NAME,
    FileRecord,
    attempt_name,
    parse_attempt,
    read_record,
    record_name,
)
from mindresume.saving.memory_tier.directory import NOTE, DiskNote
from mindresume.saving.memory_tier.slots import FormerSaves, TierSlots
from mindresume.saving.replication import copy_files
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import MAX_SMALL_FILE, Storage, publish, read_bytes, remove_tree
from mindresume.typed import Count, Limits, RelativePath, decode, parse_json

COPIES = 2  # that a node keeps: the newest whole one, and the one that is received
_CHUNK = 1 << 20  # bytes: a part that stays in the cache while it is hashed and written
_HEAD = 1 << 16  # bytes of a message
_SHARE = 0.5  # of the time between two saves, that a copy takes
# seconds: between two looks at the records of other ranks, and for all of them
_PAUSE, _SETTLE = 0.05, 60.0
_OVERWRITTEN = (
    "it was overwritten before all of it was sent: a copy takes longer than two saves are apart"
)


@dataclass(frozen=True)
class Ring:
    """Which node keeps copies for which: the one that is ``offset`` nodes further, in the order of
    their first ranks."""

    nodes: SharedGroups
    offset: int

    @property
    def is_alone(self) -> bool:
        """Whether each node would keep its own saves."""
        return self.offset % len(set(self.nodes.leaders)) == 0

    def partner(self, rank: int, step: int = 1) -> int:
        """Returns the first rank of the node that keeps what the node of ``rank`` saves; with
        ``step`` -1 of the node whose saves that node keeps."""
        leaders = sorted(set(self.nodes.leaders))
        own = leaders.index(self.nodes.leaders[rank])
        return leaders[(own + step * self.offset) % len(leaders)]

    def kept(self, rank: int, sizes: Sequence[int]) -> int:
        """Returns the bytes of the copies that the node of ``rank`` keeps. ``sizes``: of a save of
        each rank."""
        return COPIES * sum(sizes[other] for other in self.nodes.ranks(self.partner(rank, -1)))

    def why_not(self, slots: int, sizes: Sequence[int], rooms: Sequence[int]) -> str:
        """Returns why some node has no memory for copies; empty if all have. ``slots``: of each
        rank. ``rooms``: bytes that are left, by rank; those of the first rank of a node count."""
        for leader in sorted(set(self.nodes.leaders)):
            own = slots * sum(sizes[rank] for rank in self.nodes.ranks(leader))
            needed = own + self.kept(leader, sizes)
            if needed > rooms[leader]:
                return (
                    f"the node of rank {leader} needs {size_text(needed)} in memory for its saves "
                    f"and the copies that it keeps, and has {size_text(rooms[leader])}"
                )
        return ""


def room(directory: CheckpointDir, freed: int) -> int:
    """Returns the bytes that can still be written into memory. ``freed``: bytes there that are
    removed before."""
    free = directory.storage.free_space(directory.root) + freed
    return min(free - free // host_memory.RESERVE, host_memory.left() + freed)


# ---- the way ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Message:
    """A request to a ``Keeper``.

    Attributes:
        kind: ``begin`` a save of ``size`` bytes in all; a ``file``, whose bytes follow if the
            answer is that it is not there; a ``record`` of ``size`` bytes, which follow.
        name: of the attempt.
        note: with ``begin``: the ``DiskNote`` of the sender.
    """

    kind: Literal["begin", "file", "record"]
    name: Annotated[str, Limits(1, MAX_NAME)] = "-"
    size: Count = 0
    rank: Count = 0
    iterations: bool = False
    file: FileRecord | None = None
    note: DiskNote | None = None


@dataclass(frozen=True)
class _Answer:
    """``error``: why it was not done; empty: done. ``has``: the file is there."""

    error: str = ""
    has: bool = False


def _sent(channel: Channel, message: _Message | _Answer) -> None:
    send_message(channel, json.dumps(asdict(message)).encode())


def _received(channel: Channel, kind: type[Any]) -> Any:
    """Returns the next message. Raises OSError, also if it is none."""
    try:
        return decode(kind, parse_json(receive_message(channel, _HEAD)), "message")
    except (ValueError, RecordError) as error:
        raise ConnectionError(str(error)) from error


@dataclass
class _Partner:
    """A ``Keeper`` at the other end as a ``Place``. ``seconds``: that all ``size`` bytes shall take
    at least."""

    channel: Channel
    size: int = 0
    seconds: float = 0.0
    sent: int = 0
    began: float = field(default_factory=runtime.monotonic)

    def ask(self, message: _Message) -> bool:
        _sent(self.channel, message)
        return self.answer()

    def answer(self) -> bool:
        answer = _received(self.channel, _Answer)
        if answer.error:
            raise SaveError(answer.error)
        return bool(answer.has)

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        return self.ask(_Message("file", attempt, file=file))

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        left = file.size or 0
        with storage.open(path) as source:
            while left:
                piece = source.read(min(left, _CHUNK))
                if not piece:
                    raise FileNotFoundError(f"{path} became shorter")
                self.channel.send(piece)
                left -= len(piece)
                self.sent += len(piece)
                ahead = self.seconds * self.sent / self.size if self.size else 0.0
                ahead -= runtime.monotonic() - self.began
                if ahead > 0:
                    runtime.sleep(ahead)
        self.answer()

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        _sent(self.channel, _Message("record", attempt, len(record), rank))
        self.channel.send(record)
        self.answer()


def push(
    channel: Channel, source: CheckpointDir, candidate: Candidate, seconds: float = 0.0
) -> int:
    """Sends what a tier has of one save to the ``Keeper`` at the other end. Returns the bytes of
    its files. ``seconds``: that it shall take at least. Raises OSError, RecordError, SaveError."""
    storage = source.storage
    rows = {}
    for rank in sorted(candidate.files):
        data = read_bytes(storage, candidate.in_records(record_name(rank)))
        rows[rank] = data, read_record(io.BytesIO(data)).files
    size = sum(file.size or 0 for _, files in rows.values() for file in files)
    place = _Partner(channel, size, seconds)
    note = DiskNote.read(storage, source.root)
    place.ask(
        _Message("begin", candidate.name, size, iterations=bool(candidate.iteration_dir), note=note)
    )
    for rank, (_, files) in rows.items():
        paths = [source.path(file.path) for file in candidate.files[rank]]
        copy_files(place, candidate.name, storage, zip(paths, files, strict=True))
    for rank, (data, _) in rows.items():
        place.put_record(candidate.name, rank, data)
    return size


class Keeper:
    """Receives saves into a tier: one on each connection, one connection at a time.

    Args:
        keeps_last: it is a tier of copies, which keeps the newest whole one only when another one
            begins. Else nothing is removed.
    """

    def __init__(self, tier: CheckpointDir, keeps_last: bool):
        self.tier, self.keeps_last = tier, keeps_last
        self._lock = runtime.Lock()

    def serve(self, channel: Channel) -> None:
        """Receives one save. Raises OSError if the connection fails."""
        if not self._lock.acquire(timeout=DEADLINE / 2):  # the connection before may still end
            _received(channel, _Message)
            _sent(channel, _Answer("the partner receives another copy just now"))
            return
        try:
            self._serve(channel)
        finally:
            self._lock.release()

    def _serve(self, channel: Channel) -> None:
        incoming = None
        while True:
            message = _received(channel, _Message)
            try:
                if incoming is None or message.kind == "begin":
                    incoming = self._begin(message)
                    answer = _Answer()
                else:
                    answer = incoming.receive(channel, message)
            except ConnectionError:
                raise
            except (OSError, MindResumeError, ValueError) as error:
                _sent(channel, _Answer(f"the partner refuses it: {error}"[: _HEAD // 8]))
                return
            _sent(channel, answer)

    def _begin(self, message: _Message) -> _Incoming:
        parsed = parse_attempt(message.name)
        if message.kind != "begin" or parsed is None:
            raise RecordError(f"{message.name!r} is not the name of a save")
        step, run = parsed
        tier, note = self.tier, message.note
        target = SaveTarget(tier.storage, tier.root, run, 0, 1, message.iterations)
        before = DiskNote.read(tier.storage, tier.root)
        if self.keeps_last:
            whole = [row for row in scan_records(tier)[0] if row.problem is None]
            for path in FormerSaves(target, whole[0] if whole else None).paths():
                status = tier.storage.status(path)
                if status is not None and status.is_folder:
                    remove_tree(tier.storage, path)
                else:
                    tier.storage.remove(path)
            if note is None:
                tier.storage.remove(tier.path(NOTE))
        left = room(tier, 0)
        if message.size > left:
            raise SaveError(
                f"its memory is full: a copy needs {size_text(message.size)}, {tier.root} has "
                f"{size_text(left)}"
            )
        if note is not None and (self.keeps_last or before is None or before.order < note.order):
            note.write(tier.storage, tier.root)
        return _Incoming(target, step, message.name)


@dataclass
class _Incoming:
    """A save that is being received. ``there``: its files that are whole."""

    target: SaveTarget
    step: int
    name: str
    there: set[FileRecord] = field(default_factory=set)

    def receive(self, channel: Channel, message: _Message) -> _Answer:
        """Receives a file or a record. Raises MindResumeError if it is not what it should be, and
        OSError."""
        if message.name != self.name:
            raise RecordError(f"a part of {message.name} within {self.name}")
        if message.kind == "record":
            self._record(channel, message)
            return _Answer()
        file = message.file
        if file is None or file.size is None or file.checksum is None or file.format not in FORMATS:
            raise RecordError("a file without format, size and checksum")
        decode(RelativePath, file.path, "path")  # type: ignore[arg-type]
        if not file.path.endswith(f".{file.format}"):
            raise RecordError(f"{file.path} is no file of format {file.format}")
        storage, path = (
            self.target.storage,
            os.path.join(self.target.data_dir(self.step), file.path),
        )
        has = storage.status(path) is not None and is_as_recorded(storage, path, file)
        if not has:
            _sent(channel, _Answer())
            storage.make_folder(os.path.dirname(path))
            pieces = _pieces(channel, file.size, file.checksum)
            try:
                publish(storage, path, pieces, self.target.run)
            except OSError:
                for _ in pieces:  # so that the sender learns why
                    pass
                raise
        self.there.add(file)
        return _Answer(has=has)

    def _record(self, channel: Channel, message: _Message) -> None:
        target = self.target
        if message.size > MAX_SMALL_FILE:
            raise RecordError(f"a record of {message.size} bytes")
        data = b"".join(map(bytes, _pieces(channel, message.size)))
        record = read_record(io.BytesIO(data))
        if attempt_name(record.state.step, record.run) != self.name or record.rank != message.rank:
            raise RecordError(f"the record is of rank {record.rank}, step {record.state.step}")
        if missing := set(record.files) - self.there:
            raise RecordError(f"{missing.pop().path} was not sent before its record")
        target.storage.make_folder(target.attempt(self.step))
        path = os.path.join(target.attempt(self.step), record_name(record.rank))
        publish(target.storage, path, [data], target.run)


def _pieces(channel: Channel, size: int, checksum: str | None = None) -> Iterator[memoryview]:
    """Yields ``size`` bytes as they arrive. Raises SaveError after the last one if they do not have
    this checksum."""
    arrived = xxh3_128()
    while size:
        piece = channel.receive(min(size, _CHUNK))
        size -= len(piece)
        if checksum is not None:
            arrived.update(piece)
        yield piece
    if checksum is not None and arrived.hexdigest() != checksum:
        raise SaveError(_OVERWRITTEN)


# ---- the sender ----------------------------------------------------------------------------------


class Copies:
    """Sends the saves of this node to its partner, in a thread of the first process of the node."""

    def __init__(self, slots: TierSlots, partner: Endpoint, emit: Emit):
        self.slots, self.partner, self.emit = slots, partner, emit
        self._steps: runtime.SimpleQueue[Any] = runtime.SimpleQueue()
        self._reasons: set[str] = set()
        self._is_closed = False
        runtime.Thread(target=self._run, name="mindresume-partner", daemon=True).start()

    def offer(self, step: int) -> None:
        """Has a step sent that this rank has recorded. Returns at once."""
        self._steps.put((step, runtime.monotonic()))

    def close(self) -> None:
        """Ends the thread after the step that it is sending. It says nothing any more: the
        training ends."""
        self._is_closed = True
        self._steps.put(None)

    def _run(self) -> None:
        before: float | None = None
        while (row := self._steps.get()) is not None:
            step, at = row
            apart, before = 0.0 if before is None else at - before, at
            if not self._steps.empty():  # a newer one, or the end
                continue
            began = runtime.monotonic()
            try:
                size = self._send(step, apart * _SHARE)
            except FileNotFoundError:
                self._failed(step, _OVERWRITTEN)
            except Exception as error:  # any error: it costs this copy alone
                self._failed(step, str(error))
            else:
                self.emit(PartnerCopied(step, size, runtime.monotonic() - began))

    def _send(self, step: int, seconds: float) -> int:
        target, until = self.slots.target, runtime.monotonic() + _SETTLE
        while not self.slots.is_whole(step):
            if runtime.monotonic() > until or not self._steps.empty():
                raise SaveError("not all ranks of this node have saved it")
            runtime.sleep(_PAUSE)
        name = attempt_name(step, target.run)
        candidate = next((row for row in scan_records(target)[0] if row.name == name), None)
        if candidate is None or candidate.problem is not None:
            raise FileNotFoundError(name)
        channel = connect(self.partner)
        try:
            return push(channel, target, candidate, seconds)
        finally:
            channel.close()

    def _failed(self, step: int, reason: str) -> None:
        if reason not in self._reasons and not self._is_closed:
            self._reasons.add(reason)
            self.emit(PartnerCopyFailed(step, reason))


@dataclass
class Partner:
    """The partner copies of a training, as one rank has them.

    Args:
        kept: the tier of copies on this node.
        endpoints: of the first rank of each node, by rank.
        door: of this process, if it is the first of its node.
    """

    ring: Ring
    rank: int
    kept: CheckpointDir
    endpoints: Sequence[Any]
    door: Door | None
    copies: Copies | None = None

    def room(self, tier: CheckpointDir, freed: int) -> int:
        """Returns the bytes that this node has for its saves and copies; 0 if another rank says so.
        ``freed``: bytes of earlier runs in ``tier``. Raises OSError."""
        if self.door is None:
            return 0
        kept = SaveTarget(self.kept.storage, self.kept.root, "", 0, 1)
        return room(tier, freed + FormerSaves(kept).size())

    def begin(self, slots: TierSlots, sizes: Sequence[int], emit: Emit) -> None:
        """Begins to send what ``slots`` has. ``sizes``: of a save of each rank."""
        if self.door is None:
            return
        source, partner = self.ring.partner(self.rank, -1), self.ring.partner(self.rank)
        emit(
            Notice(
                f"memory of this node also keeps copies of the saves of rank "
                f"{listed(self.ring.nodes.ranks(source))}: "
                f"{size_text(self.ring.kept(self.rank, sizes))}; the node of rank {partner}, "
                f"{self.endpoints[partner][0]}, keeps those of this node"
            )
        )
        self.copies = Copies(slots, Endpoint(*self.endpoints[partner]), emit)

    def offer(self, step: int) -> None:
        """Has a step sent that this rank has recorded. Returns at once."""
        if self.copies is not None:
            self.copies.offer(step)

    def stop(self) -> None:
        """Sends nothing more."""
        if self.copies is not None:
            self.copies.close()

    def close(self) -> None:
        """Receives nothing more. All nodes have stopped to send, or do not begin."""
        if self.door is not None:
            self.door.close()

    def remove(self) -> None:
        """Receives nothing more, and removes the copies that this node keeps. Raises OSError."""
        self.close()
        if self.door is not None:
            remove_tree(self.kept.storage, self.kept.root)

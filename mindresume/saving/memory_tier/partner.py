"""Copies of what one node saves in memory, in the memory of another node, its partner.

    {tier}.partner/         what this node keeps for another one: a tier like its own

    ring = Ring(nodes, offset)                          # on all ranks
    keeper = Keeper(kept, keeps_last=True)              # on the first rank of each node
    listener = listen(keeper.serve)
    copies = Copies(tier, ring.partner's endpoint, emit);  copies.offer(step)
    push(channel, tier, candidate)                      # one save, to any ``Keeper``

The first process of each node sends a save once all ranks of its node have recorded it, in a
thread, as slowly as half of the time between two saves allows. A save that the training overwrites
meanwhile is given up: the receiver compares the checksums of each file with those in the records,
which it gets first and publishes last. So a copy that has a record is what was saved.

What is kept: the newest whole copy and the one that is received. All nodes have a common step as
long as a copy takes less than the time between two saves. If a node is lost, the next start has it
pushed back, into the tier of the node that needs it (``mindresume.resume.partner_source``).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from xxhash import xxh3_128

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.coordination.channel import (
    DEADLINE,
    Channel,
    Endpoint,
    Listener,
    connect,
    receive_message,
    send_message,
)
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import MindResumeError, RecordError, SaveError
from mindresume.events import SILENT, Emit, Notice, PartnerCopied, PartnerCopyFailed, Progress
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.formats.weight_files import is_as_recorded
from mindresume.formatting import listed, size_text
from mindresume.model.manifest import (
    MAX_NAME,
    FileRecord,
    attempt_name,
    parse_attempt,
    read_details,
    read_record,
    record_name,
)
from mindresume.saving.memory_tier.directory import NOTE, DiskNote
from mindresume.saving.memory_tier.slots import FormerSaves, TierSlots
from mindresume.saving.replication import copy_files
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import (
    MAX_SMALL_FILE,
    Hurry,
    Storage,
    parallel,
    publish,
    read_bytes,
    remove_tree,
)
from mindresume.typed import Count, Limits, decode, parse_json

COPIES = 2  # that a node keeps: the newest whole one, and the one that is received
_CHUNK = 1 << 20  # bytes: a part that stays in the cache while it is hashed and written
_HEAD = 1 << 20  # bytes of a message
_SHARE = 0.5  # of the time between two saves, that a copy takes
# seconds: between two looks at the records of other ranks, and for all of them
_PAUSE, _SETTLE = 0.05, 60.0
# looks, one a second, whether a copy has to hurry, before it sends some bytes all the same
_LOOKS = int(DEADLINE / 3)
_OVERWRITTEN = (
    "its bytes are not those that were saved: it was overwritten before all of it was sent, as a "
    "copy takes longer than two saves are apart, or it is damaged"
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


# ---- one save, over a connection -----------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """The first message. Records follow, then, one after the other, the files that the answer
    names.

    Attributes:
        name: of the attempt.
        iterations: it has the format of iteration folders.
        records: bytes of each record.
        note: of the tier of the sender.
    """

    name: Annotated[str, Limits(1, MAX_NAME)]
    iterations: bool
    records: Annotated[tuple[Count, ...], Limits(1, _HEAD // 8)]
    note: DiskNote | None = None


@dataclass(frozen=True)
class _Answer:
    """The answer to the records, to each file, and to the end. ``error``: why it was not done;
    empty: done. ``lacks``: paths of the files that are wanted."""

    error: str = ""
    lacks: tuple[str, ...] = ()


def _send(channel: Channel, message: _Offer | _Answer) -> None:
    send_message(channel, json.dumps(asdict(message)).encode())


def _receive(channel: Channel, kind: type[Any]) -> Any:
    """Returns the next message. Raises OSError, also if it is none."""
    try:
        return decode(kind, parse_json(receive_message(channel, _HEAD)), "message")
    except (ValueError, RecordError) as error:
        raise ConnectionError(str(error)) from error


def _answer(channel: Channel) -> _Answer:
    answer: _Answer = _receive(channel, _Answer)
    if answer.error:
        raise SaveError(answer.error)
    return answer


@dataclass
class _Receiver:
    """A ``Keeper`` at the other end, for ``copy_files``. ``seconds``: that all ``size`` bytes shall
    take at least."""

    channel: Channel
    lacks: Collection[str]
    size: int
    seconds: float
    progress: Progress
    hurry: Hurry | None
    sent: int = 0
    began: float = field(default_factory=runtime.monotonic)

    def _ahead(self) -> float:
        """Returns the seconds by which it is faster than it shall be."""
        if self.hurry is not None and self.hurry.is_hurried():
            return 0.0
        return self.seconds * self.sent / self.size - (runtime.monotonic() - self.began)

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        return file.path not in self.lacks

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
                self.progress.advance(len(piece))
                for _ in range(_LOOKS):  # the other end waits no longer
                    if (ahead := self._ahead()) <= 0:
                        break
                    runtime.sleep(min(ahead, 1.0))
        _answer(self.channel)


def push(
    channel: Channel,
    source: CheckpointDir,
    candidate: Candidate,
    seconds: float = 0.0,
    progress: Progress = SILENT,
    hurry: Hurry | None = None,
) -> int:
    """Sends what a tier has of one save to the ``Keeper`` at the other end. Returns the bytes of
    its files. ``seconds``: that it shall take at least, unless there is a ``hurry``. ``progress``:
    receives the bytes that are sent. Raises OSError, RecordError, SaveError."""
    storage, records = source.storage, []
    files: list[tuple[str, FileRecord]] = []
    for rank, here in sorted(candidate.files.items()):
        records.append(read_bytes(storage, candidate.in_records(record_name(rank))))
        named = read_record(io.BytesIO(records[-1])).files
        files += zip((source.path(file.path) for file in here), named, strict=True)
    size = sum(file.size or 0 for _, file in files)
    note = DiskNote.read(storage, source.root)
    lengths = tuple(map(len, records))
    _send(channel, _Offer(candidate.name, bool(candidate.iteration_dir), lengths, note))
    for record in records:
        channel.send(record)
    receiver = _Receiver(channel, _answer(channel).lacks, size, seconds, progress, hurry)
    copy_files(receiver, candidate.name, storage, files)
    _answer(channel)
    return size


class Keeper:
    """Receives saves into a tier: one on each connection, one connection at a time.

    Args:
        keeps_last: it is a tier of copies, which keeps the newest whole one only when another one
            comes. Else nothing is removed.
    """

    def __init__(self, tier: CheckpointDir, keeps_last: bool):
        self.tier, self.keeps_last = tier, keeps_last
        self._lock = runtime.Lock()
        self._channel: Channel | None = None
        self._is_closed = False

    def serve(self, channel: Channel) -> None:
        """Receives one save. Raises OSError if the connection fails."""
        offer = _receive(channel, _Offer)
        if not self._lock.acquire(timeout=DEADLINE / 2):  # the connection before may still end
            _send(channel, _Answer("the partner receives another copy just now"))
            return
        try:
            self._channel = channel
            if self._is_closed:
                raise ConnectionResetError("the partner keeps no more copies")
            self._keep(channel, offer)
            answer = _Answer()
        except ConnectionError:
            raise
        except (OSError, MindResumeError, ValueError) as error:
            answer = _Answer(f"the partner refuses it: {error}"[: _HEAD // 8])
        finally:
            self._channel = None
            self._lock.release()
        _send(channel, answer)

    def close(self) -> None:
        """Receives nothing more: what arrives just now is cut off, and nothing is written after
        it, so that the tier can be removed."""
        self._is_closed = True
        channel = self._channel
        if channel is not None:
            channel.close()
        if self._lock.acquire(timeout=DEADLINE):
            self._lock.release()

    def keep_only(self, name: str) -> None:
        """Removes all copies but that of a save. Raises OSError."""
        # the first save may wait for this; a copy that comes just now removes the older ones itself
        if not self._lock.acquire(timeout=0):
            return
        try:
            kept = [row for row in scan_records(self.tier)[0] if row.name == name]
            self._remove(kept)
            if not kept:
                self._take_over(None)
        finally:
            self._lock.release()

    def former(self, but: Candidate | None = None) -> FormerSaves:
        """Returns what is in the tier, except ``but``."""
        return FormerSaves(SaveTarget(self.tier.storage, self.tier.root, "", 0, 1), but)

    def _remove(self, but: Sequence[Candidate]) -> None:
        """Removes what is in the tier, except the first of ``but``, if there is one."""
        storage, files = self.tier.storage, []
        for path in self.former(but[0] if but else None).paths():
            status = storage.status(path)
            if status is not None and status.is_folder:  # records first
                remove_tree(storage, path)
            else:
                files.append(path)
        parallel(storage, storage.remove, files)  # the sender waits, DEADLINE at most

    def _keep(self, channel: Channel, offer: _Offer) -> None:
        """Raises MindResumeError if what comes is not what it should be; OSError."""
        parsed, storage, root = parse_attempt(offer.name), self.tier.storage, self.tier.root
        if parsed is None or sum(offer.records) > MAX_SMALL_FILE:
            raise RecordError(f"{offer.name!r} is not the name of a save, or its records are long")
        step, run = parsed
        target = SaveTarget(storage, root, run, 0, 1, offer.iterations)
        records = [b"".join(map(bytes, _pieces(channel, size))) for size in offer.records]
        heads = [read_details(io.BytesIO(record))[0] for record in records]
        for head in heads:
            if attempt_name(head.state.step, head.run) != offer.name:
                raise RecordError(f"a record of step {head.state.step} within {offer.name}")
        if self.keeps_last:
            self._remove([row for row in scan_records(self.tier)[0] if row.problem is None])
        named = {
            os.path.join(target.data_dir(step), file.path): file
            for head in heads
            for file in head.files
        }

        def is_there(row: tuple[str, FileRecord]) -> bool:
            return storage.status(row[0]) is not None and is_as_recorded(storage, *row)

        found = parallel(storage, is_there, named.items())  # as above
        lacks = {
            path: file
            for (path, file), there in zip(named.items(), found, strict=True)
            if not there
        }
        needed, left = sum(file.size or 0 for file in lacks.values()), room(self.tier, 0)
        if needed > left:
            raise SaveError(
                f"its memory is full: a copy needs {size_text(needed)}, {root} has "
                f"{size_text(left)}"
            )
        self._take_over(offer.note)
        _send(channel, _Answer("", tuple(file.path for file in lacks.values())))
        for path, file in lacks.items():
            storage.make_folder(os.path.dirname(path))
            pieces = _pieces(channel, file.size or 0, file.checksum)
            try:
                publish(storage, path, pieces, run)
            except OSError:
                for _ in pieces:  # so that the sender learns why
                    pass
                raise
            _send(channel, _Answer())
        storage.make_folder(target.attempt(step))
        for head, record in zip(heads, records, strict=True):
            path = os.path.join(target.attempt(step), record_name(head.rank))
            publish(storage, path, [record], run)

    def _take_over(self, note: DiskNote | None) -> None:
        """Writes the note of the sender, unless this tier has a newer one of its own."""
        storage, root = self.tier.storage, self.tier.root
        own = None if self.keeps_last else DiskNote.read(storage, root)
        if note is not None and (own is None or own.order < note.order):
            note.write(storage, root)
        elif note is None and self.keeps_last:
            storage.remove(os.path.join(root, NOTE))


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
    """Sends the saves of this node to its partner, in a thread of the first process of the node.
    Raises RuntimeError if there can be none."""

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
            return push(channel, target, candidate, seconds, hurry=self)
        finally:
            channel.close()

    def is_hurried(self) -> bool:
        """Returns whether a newer save waits: steps take less time than before."""
        return not self._steps.empty()

    def _failed(self, step: int, reason: str) -> None:
        kind = "".join(filter(str.isalpha, reason))  # without numbers
        if kind not in self._reasons and not self._is_closed:
            self._reasons.add(kind)
            self.emit(PartnerCopyFailed(step, reason))


@dataclass
class Partner:
    """The partner copies of a training, as one rank has them.

    Args:
        keeper: of the copies on this node.
        endpoints: of the first rank of each node, by rank.
        listener: of this process, if it is the first of its node.
    """

    ring: Ring
    rank: int
    keeper: Keeper
    endpoints: Sequence[Any]
    listener: Listener | None
    copies: Copies | None = None

    def room(self, tier: CheckpointDir, freed: int) -> int:
        """Returns the bytes that this node has for its saves and copies; 0 if another rank says so.
        ``freed``: bytes of earlier runs in ``tier``. Raises OSError."""
        if self.listener is None:
            return 0
        return room(tier, freed + self.keeper.former().size())

    def begin(self, slots: TierSlots, sizes: Sequence[int], emit: Emit) -> None:
        """Begins to send what ``slots`` has. ``sizes``: of a save of each rank."""
        if self.listener is None:
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
        try:
            self.copies = Copies(slots, Endpoint(*self.endpoints[partner]), emit)
        except RuntimeError as error:  # the limit of threads is reached
            emit(PartnerCopyFailed(None, str(error)))

    def set_aside(self, loaded: Candidate | None) -> None:
        """Removes the copies of earlier runs, except that of the save which the training has
        loaded. Raises OSError."""
        if self.listener is not None:
            self.keeper.keep_only(loaded.name if loaded is not None else "")

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
        if self.listener is not None:
            self.listener.close()
            self.keeper.close()

    def remove(self) -> None:
        """Receives nothing more, and removes the copies that this node keeps. Raises OSError."""
        self.close()
        if self.listener is not None:
            remove_tree(self.keeper.tier.storage, self.keeper.tier.root)

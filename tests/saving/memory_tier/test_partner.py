"""Copies in memory of a partner node: the protocol on real sockets, who keeps what, and what a
training of two nodes does."""

import json
import os
import shutil
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from coordination.test_storage_topology import save_part
from manager_jobs import JOBS, Job
from rank_folders import RUN, STORAGE, Ranks, dir_at, flip_bit, path_of

import mindresume
from mindresume import runtime
from mindresume.api.maintenance import flush
from mindresume.coordination import channel as channels
from mindresume.coordination.channel import Endpoint, connect, listen
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import SaveError
from mindresume.events import (
    Counted,
    Notice,
    PartnerCopied,
    PartnerCopyFailed,
    PartnerFetched,
    TierSaved,
    ignore,
)
from mindresume.formats.records import scan_records
from mindresume.model.manifest import (
    Details,
    FileRecord,
    attempt_name,
    read_record,
    record_name,
)
from mindresume.resume import partner_source
from mindresume.resume.job_selection import CheckpointSelector, SelectionRequest
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.memory_tier import directory, opening, partner
from mindresume.saving.memory_tier.directory import NOTE, OWNER, PARTNER, DiskNote
from mindresume.saving.memory_tier.opening import newest_run
from mindresume.saving.memory_tier.partner import Keeper, Ring, push
from mindresume.settings import MemoryTierSettings, Settings
from sim.cluster import current_process

# ---- who keeps what ------------------------------------------------------------------------------


def test_the_nodes_form_a_ring():
    ring = Ring(SharedGroups((0, 0, 2, 2, 4, 4)), 1)
    assert [ring.partner(rank) for rank in range(6)] == [2, 2, 4, 4, 0, 0]
    assert [ring.partner(rank, -1) for rank in (0, 2, 4)] == [4, 0, 2]
    assert [replace(ring, offset=2).partner(rank) for rank in (0, 2, 4)] == [4, 0, 2]
    assert replace(ring, offset=3).is_alone and Ring(SharedGroups((0, 0)), 1).is_alone


def test_memory_is_counted_for_the_own_saves_and_the_copies():
    ring = Ring(SharedGroups((0, 0, 2, 2)), 1)
    sizes = [10, 10, 1, 1]
    assert [ring.kept(rank, sizes) for rank in (0, 2)] == [4, 40]
    assert ring.why_not(2, sizes, [44, 0, 44, 0]) == ""
    assert "the node of rank 2" in ring.why_not(2, sizes, [44, 0, 43, 0])


# ---- the protocol --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")


@pytest.fixture
def tier(tmp_path):
    """Returns a tier with steps 5 and 10 of rank 2 and 3."""
    for step in (5, 10):
        save_part(tmp_path / "tier", step, commit=False)
    return dir_at(tmp_path / "tier")


@pytest.fixture
def kept(tmp_path):
    (tmp_path / "kept").mkdir()
    return dir_at(tmp_path / "kept")


@pytest.fixture
def listener(kept):
    with_listener = listen(Keeper(kept, keeps_last=True).serve)
    yield with_listener
    with_listener.close()


def steps(tier):
    """Returns {step: ranks} of the whole saves."""
    return {row.step: sorted(row.files) for row in scan_records(tier)[0] if row.problem is None}


def sent(listener, tier, step, seconds=0.0):
    """Sends a step; returns the bytes."""
    (candidate,) = [row for row in scan_records(tier)[0] if row.step == step]
    channel = connect(listener.endpoint)
    try:
        return push(channel, tier, candidate, seconds)
    finally:
        channel.close()


def names(folder):
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
    )


def test_a_copy_is_byte_for_byte_what_was_saved(tier, kept, listener):
    (candidate,) = [row for row in scan_records(tier)[0] if row.step == 10]
    channel, progress = connect(listener.endpoint), Counted()
    size = push(channel, tier, candidate, progress=progress)
    channel.close()
    assert (
        size == progress.done == sum(path_of(tier.root, 10, rank).stat().st_size for rank in (2, 3))
    )
    assert steps(kept) == {10: [2, 3]}
    for name in names(kept.root):
        assert Path(kept.root, name).read_bytes() == Path(tier.root, name).read_bytes()


def test_the_newest_whole_copy_stays_until_another_one_is_whole(tier, kept, listener):
    for step in (15, 20):
        save_part(tier.root, step, commit=False)
    sent(listener, tier, 5)
    sent(listener, tier, 10)
    assert steps(kept) == {5: [2, 3], 10: [2, 3]}
    flip_bit(path_of(tier.root, 15, 3))
    with pytest.raises(SaveError, match="overwritten"):
        sent(listener, tier, 15)
    assert steps(kept) == {10: [2, 3]}
    sent(listener, tier, 20)
    assert steps(kept) == {10: [2, 3], 20: [2, 3]}
    # what was half received is gone
    assert not any("15" in name for name in names(kept.root))


def test_the_note_of_the_disk_goes_with_the_copy(tier, kept, listener):
    DiskNote("key", RUN, 4).write(STORAGE, tier.root)
    sent(listener, tier, 5)
    assert DiskNote.read(STORAGE, kept.root) == DiskNote("key", RUN, 4)
    os.remove(tier.path(NOTE))
    sent(listener, tier, 10)
    assert DiskNote.read(STORAGE, kept.root) is None


def test_a_save_comes_into_a_tier_beside_what_is_there(tier, kept):
    save_part(kept.root, 5, commit=False)
    DiskNote("newer", RUN, 8).write(STORAGE, kept.root)
    DiskNote("key", RUN, 4).write(STORAGE, tier.root)
    os.remove(path_of(kept.root, 5, 3))
    listener = listen(Keeper(kept, keeps_last=False).serve)
    before = path_of(kept.root, 5, 2).stat()
    sent(listener, tier, 10)
    sent(listener, tier, 5)  # what is missing of it
    listener.close()
    assert steps(kept) == {5: [2, 3], 10: [2, 3]} and path_of(kept.root, 5, 3).exists()
    assert path_of(kept.root, 5, 2).stat().st_ino == before.st_ino
    assert DiskNote.read(STORAGE, kept.root).key == "newer"


def test_a_partner_whose_memory_is_full_says_so(tier, kept, listener, monkeypatch):
    monkeypatch.setattr(partner, "room", lambda tier, freed: 10)
    with pytest.raises(SaveError, match="memory is full"):
        sent(listener, tier, 10)
    assert names(kept.root) == []


def test_nothing_is_written_once_no_more_copies_are_kept(tier, kept):
    """A copy that arrived while a training released its memory came back into it, and stayed."""
    arrived, goes_on = threading.Event(), threading.Event()

    class Stopped(type(STORAGE)):
        def make_folder(self, path):
            if "/step-" in path:
                arrived.set()
                goes_on.wait(60)
            super().make_folder(path)

    keeper = Keeper(replace(kept, storage=Stopped()), keeps_last=True)
    listener = listen(keeper.serve)
    errors = []

    def send():
        try:
            sent(listener, tier, 10)
        except OSError as error:
            errors.append(error)

    sender, closer = threading.Thread(target=send), threading.Thread(target=keeper.close)
    sender.start()
    assert arrived.wait(60)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()  # until nothing is written any more
    goes_on.set()
    closer.join(60)
    sender.join(60)
    assert errors and not closer.is_alive()
    before = names(kept.root)
    with pytest.raises(OSError):
        sent(listener, tier, 5)
    assert names(kept.root) == before
    listener.close()


def test_the_memory_runs_full_while_a_copy_arrives(tier, tmp_path):
    class Full(type(STORAGE)):
        def write(self, path, pieces, size=0):
            next(iter(pieces))
            raise OSError(28, "No space left on device", path)

    kept = dir_at(tmp_path / "kept")
    listener = listen(Keeper(replace(kept, storage=Full()), keeps_last=True).serve)
    with pytest.raises(SaveError, match="No space left"):
        sent(listener, tier, 10)
    listener.close()
    assert steps(kept) == {}


def test_a_copy_takes_at_least_the_time_that_it_shall(tier, listener):
    clock, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    with runtime.answers({runtime.sleep: sleep, runtime.monotonic: lambda: clock[0]}):
        sent(listener, tier, 10, seconds=7.0)
    assert sum(slept) == pytest.approx(7.0)


def test_a_copy_is_not_slow_any_more_once_a_newer_save_waits(tier, listener):
    """An hour lay between two saves, and then a minute: the copy would be overwritten, and none
    made meanwhile."""

    class Hurry:
        looks = 0

        def is_hurried(self):
            self.looks += 1
            return self.looks > 3

    slept = []
    (candidate,) = [row for row in scan_records(tier)[0] if row.step == 10]
    with runtime.answers({runtime.sleep: slept.append}):
        channel = connect(listener.endpoint)
        push(channel, tier, candidate, 1800.0, hurry=Hurry())
        channel.close()
    assert slept == [1.0] * 3


# ---- who may connect -----------------------------------------------------------------------------


class Dead:
    """A handler that must not be called."""

    def __init__(self):
        self.called = 0
        self.was_called = threading.Event()

    def __call__(self, channel):
        self.called += 1
        self.was_called.set()


def test_a_slow_copy_sends_something_before_the_receiver_gives_up(tier, listener, monkeypatch):
    pauses = []
    monkeypatch.setattr(runtime, "sleep", pauses.append)
    sent(listener, tier, 10, seconds=1000.0)
    assert 0 < max(pauses) < channels.DEADLINE


def test_a_listener_that_is_closed_ends_the_connections_that_there_are(listener):
    channel = connect(listener.endpoint)
    listener.close()
    with pytest.raises(OSError):
        channel.receive(1)


def test_what_is_received_just_now_is_not_waited_for_when_older_copies_go(kept):
    keeper = Keeper(kept, keeps_last=True)
    with keeper._lock:
        keeper.keep_only("step-0000000005-0001-abcdef")


def test_who_does_not_know_the_secret_is_refused_on_both_sides():
    handler = Dead()
    listener = listen(handler)
    host, port, _ = listener.endpoint
    with pytest.raises(OSError, match="closed|secret|reset"):
        connect(Endpoint(host, port, "00" * 32))
    listener.close()
    assert handler.called == 0


def test_a_stranger_who_took_the_port_is_refused():
    """It cannot prove that it knows the secret, whatever it answers."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = server.accept()
        nonce = connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(nonce)
        proof = connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(proof)  # reflected
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(PermissionError, match="secret"):
        connect(Endpoint("127.0.0.1", server.getsockname()[1], "ab" * 32))
    thread.join()
    server.close()


def test_what_was_recorded_of_another_connection_is_no_proof():
    handler = Dead()
    listener = listen(handler)
    recorded = []
    real = socket.socket.sendall

    def sendall(self, data, *flags):
        recorded.append(bytes(data))
        return real(self, data, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            channels.SocketChannel, "send", lambda self, data: sendall(self._socket, data)
        )
        connect(listener.endpoint).close()
    nonce, proof = (
        recorded[0],
        next(row for row in recorded if len(row) == 32 and row != recorded[0]),
    )
    assert handler.was_called.wait(60) and handler.called == 1
    for first in (nonce, os.urandom(32)):
        with socket.create_connection(listener.endpoint[:2]) as stranger:
            stranger.sendall(first + proof)
            stranger.settimeout(20)
            with pytest.raises(ConnectionError):
                while stranger.recv(64):
                    pass
                raise ConnectionResetError
    listener.close()
    assert handler.called == 1


# ---- a peer that is not what it should be --------------------------------------------------------


SAVE = attempt_name(10, RUN)


class Peer:
    """Talks to a keeper as no sender of mindresume does."""

    def __init__(self, listener):
        self.channel = connect(listener.endpoint)

    def answer(self):
        return json.loads(channels.receive_message(self.channel, 1 << 16))

    def offer(self, *records, name=SAVE, **fields):
        """Sends the first message and the records; returns the answer."""
        lengths = [len(record) for record in records]
        message = {"name": name, "iterations": False, "records": lengths, **fields}
        channels.send_message(self.channel, json.dumps(message).encode())
        for record in records:
            self.channel.send(record)
        return self.answer()


@pytest.fixture
def peer(listener):
    with_peer = Peer(listener)
    yield with_peer
    with_peer.channel.close()


def record_of(tier, **changes):
    """Returns the record of rank 2 at step 10, changed."""
    with open(Path(tier.root, ".mindresume", SAVE, record_name(2)), "rb") as file:
        return replace(read_record(file), **changes).encode(Details())


@pytest.mark.parametrize(
    "path, format",
    [
        ("../../evil.safetensors", "safetensors"),
        ("/etc/evil.safetensors", "safetensors"),
        ("rank_2/../../x.ckpt", "ckpt"),
        ("rank_3/x.ckpt", "ckpt"),
        ("owner.json", "json"),
        ("owner.json", "safetensors"),
        ("", "ckpt"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(peer, tier, kept, path, format):
    record = record_of(tier, files=(FileRecord(path, format, 3, "0" * 32),))
    assert "refuses it" in peer.offer(record)["error"]
    assert names(kept.root) == []


def test_a_record_that_is_damaged_or_of_another_save_is_refused(tier, kept, listener):
    whole = record_of(tier)
    for record, reason in (
        (whole[:-9], "refuses it"),
        (b"{}", "refuses it"),
        (record_of(tier, run="0002-0000bbbb"), "a record of step 10 within"),
    ):
        peer = Peer(listener)
        assert reason in peer.offer(record)["error"]
        peer.channel.close()
    assert names(kept.root) == []


@pytest.mark.parametrize("name", ["step-0000000010", "../x", "owner.json", SAVE + "/.."])
def test_a_name_that_is_not_that_of_a_save_is_refused(peer, tier, kept, name):
    assert "is not the name of a save" in peer.offer(record_of(tier), name=name)["error"]
    assert names(kept.root) == []


def test_records_without_bound_are_refused_before_they_are_read(peer, kept):
    channels.send_message(
        peer.channel, json.dumps({"name": SAVE, "iterations": False, "records": [1 << 40]}).encode()
    )
    assert "its records are long" in peer.answer()["error"]


@pytest.mark.parametrize(
    "message",
    [b"{}", b"[" * 5000, b"\xff", b'{"name": "x", "iterations": 1}', b'{"name": 1, "records": []}'],
)
def test_a_message_that_is_none_ends_the_connection(peer, kept, message):
    channels.send_message(peer.channel, message)
    with pytest.raises(ConnectionError):
        peer.channel.receive(1)
    assert names(kept.root) == []


def test_a_length_beyond_all_bounds_ends_the_connection(peer):
    peer.channel.send(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError):
        peer.channel.receive(1)


def test_bytes_that_changed_on_the_way_are_refused(peer, tier, kept):
    answer = peer.offer(record_of(tier))
    (path,) = answer["lacks"]
    peer.channel.send(bytes(Path(tier.root, path).stat().st_size))
    assert "overwritten" in peer.answer()["error"]
    assert names(kept.root) == []


def test_a_sender_that_dies_leaves_nothing_that_counts_and_the_next_one_is_served(
    tier, kept, listener
):
    sent(listener, tier, 5)
    peer = Peer(listener)
    peer.offer(record_of(tier))
    peer.channel.send(b"abc")
    peer.channel.close()
    sent(listener, tier, 10)
    assert steps(kept) == {5: [2, 3], 10: [2, 3]}
    assert not any("tmp" in name for name in names(kept.root))


def test_silent_strangers_keep_others_out_for_some_seconds_only(tier, kept, listener, monkeypatch):
    strangers = [socket.create_connection(listener.endpoint[:2]) for _ in range(2)]
    for stranger in strangers:
        stranger.recv(1)  # it is being served
    with pytest.raises(OSError):
        connect(listener.endpoint)
    for stranger in strangers:
        stranger.close()
    while True:
        with suppress(OSError):
            sent(listener, tier, 10)
            break
    assert steps(kept) == {10: [2, 3]}


def test_a_silent_client_is_given_up_after_the_deadline(monkeypatch):
    monkeypatch.setattr(channels, "_HANDSHAKE", 0.05)
    listener = listen(Dead())
    with socket.create_connection(listener.endpoint[:2]) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        assert stranger.recv(1) == b""
    listener.close()


def test_the_address_is_the_one_that_leads_to_the_scheduler():
    assert channels.own_address({"MS_SCHED_HOST": "127.0.0.1"}) == ("127.0.0.1", socket.AF_INET)
    assert channels.own_address({"MS_SCHED_HOST": "127.0.0.3"})[0].startswith("127.")


# ---- a training of two nodes ---------------------------------------------------------------------

NAME = attempt_name(8, RUN)
HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def two_nodes(memory, monkeypatch):
    """Gives each host of a simulated cluster a folder of its own in memory. Returns it."""
    real = directory.parent_of_tiers

    def parent(folder):
        own = os.path.join(folder, current_process().host.name)
        os.makedirs(own, exist_ok=True)
        return real(own)

    monkeypatch.setattr(directory, "parent_of_tiers", parent)
    monkeypatch.setattr(partner_source, "memory_identity", lambda _: current_process().host.name)
    return Path(memory)


def trained(root, memory, count=9, hosts=HOSTS, every=100, iterations=False, first=0, **tier):
    """Trains ``count`` steps after ``first`` on nodes that save every second step. Returns the
    events by rank."""
    settings = Settings(
        heartbeat=0,
        memory_tier=MemoryTierSettings(2, str(memory), partner=True, write_after_error=0, **tier),
    )

    def work(group):
        job = Job(
            root, group=group, every=every, leases={}, settings=settings, iterations=iterations
        )
        job.step = first
        for _ in range(count):
            job.steps(1)
            group.gather(b"")  # a step
            runtime.sleep(1.0)
        job.manager._tier.stop()
        JOBS.remove(job)
        return job.events

    found = Ranks(len(hosts), hosts).run(work)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def copies(memory, host):
    (folder,) = memory.glob(f"{host}/*/*{PARTNER}")
    return steps(dir_at(folder))


def test_each_node_keeps_what_the_other_saved(tmp_path, two_nodes):
    events = trained(tmp_path / "checkpoint", two_nodes)
    assert copies(two_nodes, "a") == {8: [2, 3], 6: [2, 3]}
    assert copies(two_nodes, "b") == {8: [0, 1], 6: [0, 1]}
    for rank in (0, 2):
        assert [row.step for row in of(events[rank], PartnerCopied)] == [2, 4, 6, 8]
        assert "copies of the saves of rank" in " ".join(
            row.text for row in of(events[rank], Notice)
        )
    assert not of(events[1], PartnerCopied)
    assert not any(of(row, PartnerCopyFailed) for row in events)


def chosen(root, memory, hosts=HOSTS, any_layout=False, owner=None, **tier):
    """Returns (step, whether it lies in memory) that the next start takes, and its events on rank
    0."""
    settings = Settings(memory_tier=MemoryTierSettings(2, str(memory), partner=True, **tier))
    events = []
    for path in memory.glob(f"*/*/*/{OWNER}"):  # another cluster numbers its processes anew
        changed = {**json.loads(path.read_text()), "processes": [], **(owner or {})}
        path.write_text(json.dumps(changed))

    def work(group):
        emit = events.append if group.rank == 0 else ignore
        sources = CheckpointSources(saved_to={os.path.realpath(root)})
        selector = CheckpointSelector(STORAGE, group, settings, emit, sources)
        found = selector.select(
            SelectionRequest(str(root), output_dir="/output", any_layout=any_layout)
        )
        if found.read_lock is not None:
            found.read_lock.release()
        choice = found.choice
        if any_layout and choice is not None and choice.in_memory:
            assert choice.is_in_parts  # on all ranks, or they would not do the same
        return choice and (choice.chosen.step, choice.in_memory)

    found = Ranks(len(hosts), hosts).run(work)
    for one in found:
        if isinstance(one, Exception):
            raise one
    assert len(set(found)) == 1, found
    return found[0], events


def lose(memory, host):
    shutil.rmtree(memory / host)


@pytest.mark.parametrize("host, holder, ranks", [("a", 2, (0, 1)), ("b", 0, (2, 3))])
def test_a_node_that_lost_its_memory_gets_it_from_its_partner(
    tmp_path, two_nodes, host, holder, ranks
):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, every=5)
    lose(two_nodes, host)
    found, events = chosen(root, two_nodes)
    assert found == (8, True)
    (event,) = of(events, PartnerFetched)
    assert (event.step, event.ranks, event.holder) == (8, ranks, holder)
    # nothing is fetched again
    found, events = chosen(root, two_nodes)
    assert found == (8, True) and not of(events, PartnerFetched)


@pytest.mark.parametrize("hosts", [HOSTS, ["c", "c", "a", "a"], ["a", "a", "b", "c"]])
def test_checkpoint_2_comes_back_from_a_partner_too(tmp_path, two_nodes, hosts):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, iterations=True)
    assert copies(two_nodes, "a") == {8: [2, 3], 6: [2, 3]}
    lose(two_nodes, "b")
    found, events = chosen(root, two_nodes, hosts, any_layout=True)
    assert found == (8, True) and of(events, PartnerFetched)


def test_a_node_that_got_all_parts_and_one_that_did_not_load_in_the_same_way(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, iterations=True)
    assert chosen(root, two_nodes, ["b", "b", "a", "c"], any_layout=True)[0] == (8, True)


def test_a_second_start_after_ranks_moved_loads_in_the_same_way_on_all_nodes(tmp_path, two_nodes):
    """Node a then has all parts, and node c its own: nothing is fetched any more."""
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, iterations=True)
    hosts = ["c", "c", "a", "a"]
    for _ in range(2):
        assert chosen(root, two_nodes, hosts, any_layout=True)[0] == (8, True)


def test_the_port_that_is_set_is_used_at_a_start_too(tmp_path, two_nodes, monkeypatch):
    root, ports, real = tmp_path / "checkpoint", [], partner_source.listen

    def listening(serve, port=0):
        ports.append(port)
        return real(serve, port)

    monkeypatch.setattr(partner_source, "listen", listening)
    trained(root, two_nodes)
    lose(two_nodes, "b")
    assert chosen(root, two_nodes, partner_port=4711)[0] == (8, True)
    assert ports == [4711]


def test_a_run_of_which_only_the_copies_are_left_keeps_its_number(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    for tier in two_nodes.glob("?/*/*"):
        if PARTNER not in tier.name:
            shutil.rmtree(tier)
    found = Ranks(4, HOSTS).run(lambda group: newest_run(dir_at(root), group))
    (run,) = {row.run for row in scan_records(dir_at(kept_by(two_nodes, "a")))[0]}
    assert found == [run] * 4


def test_both_nodes_lost_take_the_disk(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, every=5)
    lose(two_nodes, "a")
    lose(two_nodes, "b")
    assert chosen(root, two_nodes)[0] == (5, False)


@pytest.mark.parametrize(
    "owner", [{}, {"machine": "another container", "processes": [[1, 1]]}], ids=["dead", "unknown"]
)
def test_a_node_that_returns_with_an_older_save_gets_the_newer_one(tmp_path, two_nodes, owner):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    (tier,) = [path for path in two_nodes.glob("b/*/*") if PARTNER not in path.name]
    (newest,) = [row for row in scan_records(dir_at(tier))[0] if row.step == 8]
    shutil.rmtree(newest.records_dir)
    assert steps(dir_at(tier)) == {6: [2, 3]}
    found, events = chosen(root, two_nodes, owner=owner)
    assert found == (8, True) and len(of(events, PartnerFetched)) == 1


def test_a_copy_of_another_step_than_the_owner_has_leads_to_the_step_that_all_have(
    tmp_path, two_nodes
):
    """Megatron-LM#5281: the partner holds another step than the owner."""
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    kept = kept_by(two_nodes, "a")
    (newest,) = [row for row in scan_records(dir_at(kept))[0] if row.step == 8]
    shutil.rmtree(newest.records_dir)
    lose(two_nodes, "b")
    assert chosen(root, two_nodes)[0] == (6, True)


def kept_by(memory, host):
    (folder,) = memory.glob(f"{host}/*/*{PARTNER}")
    return folder


def test_a_damaged_copy_is_refused_and_the_one_before_is_taken(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    (newest,) = [row for row in scan_records(dir_at(kept_by(two_nodes, "a")))[0] if row.step == 8]
    flip_bit(kept_by(two_nodes, "a") / newest.files[3][0].path)
    lose(two_nodes, "b")
    found, events = chosen(root, two_nodes)
    assert found == (6, True)
    assert "does not get its part" in " ".join(row.text for row in of(events, Notice))
    assert [row.step for row in of(events, PartnerFetched)] == [6]


def test_ranks_on_other_nodes_than_before_find_their_parts(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    # each node kept what is its own now: nothing crosses the network
    found, events = chosen(root, two_nodes, hosts=["b", "b", "a", "a"])
    assert found == (8, True)
    assert [row.holder for row in of(events, PartnerFetched)] == [0, 2]


@pytest.mark.parametrize(
    "hosts",
    [
        ["a", "a", "b", "c"],
        ["a", "a", "a", "a"],
        ["c", "c", "a", "a"],
        ["a", "b", "a", "b"],
    ],
)
def test_nodes_that_were_added_or_removed_get_what_they_need(tmp_path, two_nodes, hosts):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    assert chosen(root, two_nodes, hosts=hosts)[0] == (8, True)


def test_a_node_receives_one_part_after_the_other():
    """From as many holders as there are: a receiver takes one connection at a time."""
    offers = [
        {"place": str(node), "receives": True, "parts": {NAME: {"": [node, node + 4]}}}
        for node in range(4)
    ]
    empty = {"place": "new", "receives": True, "parts": {}}
    plan = partner_source.transfers([*offers, *[empty] * 4])
    assert [(row.holder, row.receiver, row.turn) for row in plan] == [
        (node, 4, node) for node in range(4)
    ]


def test_a_newer_checkpoint_on_disk_wins_and_nothing_is_fetched(tmp_path, two_nodes):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, every=9)
    lose(two_nodes, "b")
    found, events = chosen(root, two_nodes)
    assert found == (9, False) and not of(events, PartnerFetched)


def test_what_a_person_removed_to_go_back_is_not_brought_back_by_a_partner(tmp_path, two_nodes):
    """Rank 0's node, which had the note of what was on disk, is lost, too."""
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, count=13, every=5)
    lose(two_nodes, "a")
    assert chosen(root, two_nodes)[0] == (12, True)
    lose(two_nodes, "a")
    for path in [*root.glob("rank_*/*-10_*"), *root.glob(".mindresume/step-0000000010-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert chosen(root, two_nodes)[0] == (5, False)


def test_copies_that_a_run_has_given_up_do_not_come_back(tmp_path, two_nodes, monkeypatch):
    """A person removes step 10 to go back. The next run loads step 5, has no partner copies, so
    the older copies stay, and dies after its first step."""
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, count=13, every=5)
    for path in [*root.glob("rank_*/*-10_*"), *root.glob(".mindresume/step-0000000010-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (old,) = [row for row in scan_records(dir_at(root))[0] if row.step == 5]
    real = os.path.realpath(root)
    resumed = SimpleNamespace(chosen=old, root=real, checkpoint_dir=real)
    begin = CheckpointManager.begin
    monkeypatch.setattr(CheckpointManager, "begin", lambda self, step: begin(self, 5, resumed))

    def busy(serve, port=0):
        raise OSError("the port is in use")

    monkeypatch.setattr(opening, "listen", busy)
    trained(root, two_nodes, count=1, first=5)
    assert copies(two_nodes, "a")
    assert chosen(root, two_nodes)[0] == (5, False)


def test_memory_of_a_partner_that_runs_full_at_a_start_leads_to_the_disk(
    tmp_path, two_nodes, monkeypatch
):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes, every=5)
    lose(two_nodes, "b")
    monkeypatch.setattr(partner, "room", lambda tier, freed: 10)
    assert chosen(root, two_nodes)[0] == (5, False)


def test_without_memory_for_copies_on_some_node_no_node_has_them(tmp_path, two_nodes, monkeypatch):
    real = partner.room
    monkeypatch.setattr(
        partner,
        "room",
        lambda tier, freed: 10 if current_process().host.name == "b" else real(tier, freed),
    )
    events = trained(tmp_path / "checkpoint", two_nodes)
    for row in events:
        (failed,) = of(row, PartnerCopyFailed)
        assert failed.step is None and "the node of rank 2 needs" in failed.reason
        assert [event.step for event in of(row, TierSaved)] == [2, 4, 6, 8]
    assert copies(two_nodes, "a") == {}


def test_copies_of_an_earlier_run_are_removed_when_the_next_one_begins_but_for_what_it_loaded(
    tmp_path, two_nodes
):
    """As its own saves: what was not loaded was decided against."""
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    keeper = Keeper(dir_at(kept_by(two_nodes, "a")), keeps_last=True)
    (six,) = [row for row in scan_records(keeper.tier)[0] if row.step == 6]
    keeper.keep_only(six.name)
    assert steps(keeper.tier) == {6: [2, 3]}
    trained(root, two_nodes, count=1)  # from nothing; it only reserves its memory
    assert copies(two_nodes, "a") == copies(two_nodes, "b") == {}


@pytest.mark.parametrize("hosts, offset", [(["a", "a"], 1), (HOSTS, 2)])
def test_a_node_that_would_be_its_own_partner_says_so(tmp_path, two_nodes, hosts, offset):
    events = trained(tmp_path / "checkpoint", two_nodes, hosts=hosts, partner_offset=offset)
    for row in events:
        (failed,) = of(row, PartnerCopyFailed)
        assert "each node would keep its own saves" in failed.reason


def test_a_partner_that_is_gone_costs_the_copies_and_is_said_once(tmp_path, two_nodes, monkeypatch):
    def refuse(endpoint):
        raise ConnectionRefusedError("nobody listens there")

    monkeypatch.setattr(partner, "connect", refuse)
    events = trained(tmp_path / "checkpoint", two_nodes)
    for rank in (0, 2):
        (failed,) = of(events[rank], PartnerCopyFailed)
        assert (failed.step, failed.reason) == (2, "nobody listens there")


def test_ls_verify_and_flush_know_what_a_node_keeps(tmp_path, two_nodes, monkeypatch):
    root = tmp_path / "checkpoint"
    trained(root, two_nodes)
    # on the node a, after the node b was lost
    host = two_nodes / "a"
    monkeypatch.setattr(
        directory, "parent_of_tiers", lambda folder: str(next(host.glob("mindresume-*")))
    )
    listing = mindresume.open(root).list()
    assert [(row.step, row.local_ranks, row.is_partner_copy) for row in listing.memory] == [
        (8, (0, 1), False),
        (6, (0, 1), False),
        (8, (2, 3), True),
        (6, (2, 3), True),
    ]
    report = mindresume.open(root).verify()
    assert [row.state for row in report.memory] == ["verified"] * 4
    flushed = flush(root)
    assert (flushed.step, flushed.committed) == (8, True)


def test_a_copy_that_arrives_at_the_end_of_the_training_leaves_nothing(tier, kept):
    """Found by the simulation: its record was published after its files had been removed."""
    keeper = Keeper(kept, keeps_last=True)
    listener = listen(keeper.serve)
    peer = Peer(listener)
    (path,) = peer.offer(record_of(tier))["lacks"]
    whole = Path(tier.root, path).read_bytes()
    peer.channel.send(whole[:10])
    keeper.close()  # it does not wait for the rest
    with pytest.raises(ConnectionError):
        peer.channel.send(whole[10:])
        peer.answer()
    with pytest.raises(ConnectionError):
        Peer(listener).offer(record_of(tier))
    listener.close()
    assert names(kept.root) == []

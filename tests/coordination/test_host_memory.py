"""The memory of a rank: what is left on the host and in its containers (fake /proc and /sys),
divided by those that share it."""

import pytest
from rank_folders import Ranks

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.host_memory import UNKNOWN, left, levels, share_of_rank
from sim.machine import ANSWERS

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 {above} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


class Machine:
    """``/proc`` and ``/sys`` below a folder."""

    def __init__(self, root, available=1500, boot="boot-a"):
        self.root = root
        self.write("proc/sys/kernel/random/boot_id", boot)
        if available is not None:
            self.write(
                "proc/meminfo",
                f"MemTotal:  999999999 kB\nMemAvailable:  {available * GIB >> 10} kB\n",
            )

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def group(self, own, *mounts):
        self.write("proc/self/cgroup", own)
        self.write(
            "proc/self/mountinfo",
            "\n".join(["22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw", *mounts]),
        )

    def v2(self, folder, limit, current, inactive=0, active=0, high="max"):
        self.write(f"{folder}/memory.max", limit if limit == "max" else limit * GIB)
        self.write(f"{folder}/memory.high", high if high == "max" else high * GIB)
        self.write(f"{folder}/memory.current", current * GIB)
        self.write(
            f"{folder}/memory.stat",
            f"anon 5\ninactive_file {inactive * GIB}\nactive_file {active * GIB}",
        )

    def v1(self, folder, limit, usage, cache=0, above=None):
        self.write(
            f"{folder}/memory.limit_in_bytes", 9223372036854771712 if limit is None else limit * GIB
        )
        self.write(f"{folder}/memory.usage_in_bytes", usage * GIB)
        self.write(
            f"{folder}/memory.stat",
            f"inactive_file 7\ntotal_inactive_file {cache * GIB}\n"
            f"hierarchical_memory_limit {(above or limit or 1 << 33) * GIB}",
        )

    @property
    def left(self):
        return left(str(self.root)) / GIB


def test_the_memory_of_the_host_counts_without_a_limit(tmp_path):
    machine = Machine(tmp_path, 22)
    machine.group("0::/", V2)
    assert machine.left == 22


def test_unreadable_limits_are_unknown(tmp_path):
    assert (
        left(str(tmp_path)) == UNKNOWN and share_of_rank(SingleProcess(), str(tmp_path)) == UNKNOWN
    )
    Machine(tmp_path, None).write("proc/meminfo", "MemAvailable: many")
    assert left(str(tmp_path)) == UNKNOWN


def test_the_limit_of_the_container_counts_and_file_cache_is_free(tmp_path):
    """The limit is 22 GiB: 2 are used, and 6 of the 8 that the kernel counts are file cache."""
    machine = Machine(tmp_path)
    machine.group("0::/", V2)
    machine.v2("sys/fs/cgroup", 22, 8, inactive=4, active=2)
    assert machine.left == 20


@pytest.mark.parametrize(
    "outer, inner, expected",
    [
        ((100, 40), (200, 30), 60),
        ((100, 40), (50, 30), 20),
        ((100, 40), ("max", 30), 60),
        (("max", 40), ("max", 30), 1500),
    ],
)
def test_every_parent_group_counts(tmp_path, outer, inner, expected):
    machine = Machine(tmp_path)
    machine.group("1:name=systemd:/\n0::/slurm/job_7/task_0", V2)
    machine.v2("sys/fs/cgroup/slurm", "max", 50)
    machine.v2("sys/fs/cgroup/slurm/job_7", *outer)
    machine.v2("sys/fs/cgroup/slurm/job_7/task_0", *inner)
    assert machine.left == expected


@pytest.mark.parametrize(
    "limit, used, more, left", [(22, 2, {"high": 20}, 18), (5, 9, {}, 0)], ids=["high", "exceeded"]
)
def test_memory_above_high_or_beyond_the_limit_is_not_free(tmp_path, limit, used, more, left):
    machine = Machine(tmp_path)
    machine.group("0::/pod", V2)
    machine.v2("sys/fs/cgroup/pod", limit, used, **more)
    assert machine.left == left


def test_version_1(tmp_path):
    machine = Machine(tmp_path)
    machine.group(
        "11:cpu,cpuacct:/kube/pod/box\n4:memory:/kube/pod/box\n0::/", V1.format(above="/")
    )
    machine.v1("sys/fs/cgroup/memory", None, 300)
    machine.v1("sys/fs/cgroup/memory/kube/pod", 30, 10, cache=3)
    machine.v1("sys/fs/cgroup/memory/kube/pod/box", None, 9)
    assert machine.left == 23


def test_version_1_in_a_container_that_sees_its_own_group_as_the_top(tmp_path):
    """The limit of the parent groups is still in memory.stat."""
    machine = Machine(tmp_path)
    machine.group("4:memory:/docker/3f", V1.format(above="/docker/3f"))
    machine.v1("sys/fs/cgroup/memory", None, 9, above=22)
    assert machine.left == 13


@pytest.mark.parametrize("own", ["4:memory:/../../elsewhere", "4:memory:/docker/3f"])
def test_a_path_of_another_namespace_is_where_it_is_mounted(tmp_path, own):
    machine = Machine(tmp_path)
    machine.group(own, V1.format(above="/"))
    machine.v1("sys/fs/cgroup/memory", 22, 2)
    assert machine.left == 20


def share(group, machines):
    return share_of_rank(group, str(machines[group.rank].root)) / GIB


@pytest.fixture
def kernel(monkeypatch):
    """Makes simulated ranks read the files of these machines."""
    monkeypatch.setitem(ANSWERS, levels, levels.__wrapped__)


@pytest.mark.usefixtures("kernel")
def test_eight_ranks_of_one_container_share_its_limit(tmp_path):
    """8 x 13 GiB do not pass on 22 GiB; a tenth of what is left is for what grows beside."""
    machine = Machine(tmp_path)
    machine.group("0::/", V2)
    machine.v2("sys/fs/cgroup", 22, 2)
    assert Ranks(8).run(lambda group: share(group, [machine] * 8)) == pytest.approx(
        [20 * 0.9 / 8] * 8
    )


@pytest.mark.usefixtures("kernel")
def test_containers_of_one_host_share_the_host_and_have_limits_of_their_own(tmp_path):
    machines = [Machine(tmp_path / name, 100) for name in "ab"]
    for machine, limit in zip(machines, (100, 30), strict=True):
        machine.group("0::/", V2)
        machine.v2("sys/fs/cgroup", limit, 0)
    found = Ranks(4).run(lambda group: share(group, [machines[0]] * 2 + [machines[1]] * 2))
    assert found == pytest.approx([22.5, 22.5, 13.5, 13.5])


@pytest.mark.usefixtures("kernel")
def test_hosts_share_nothing(tmp_path):
    machines = [Machine(tmp_path / name, 10, boot=name) for name in "ab"]
    assert Ranks(3).run(
        lambda group: share(group, [machines[0], machines[1], machines[1]])
    ) == pytest.approx([9, 4.5, 4.5])
    assert share_of_rank(SingleProcess(), str(machines[0].root)) == 9 * GIB


def test_the_memory_of_this_machine_is_plausible():
    assert left() > 1 << 20

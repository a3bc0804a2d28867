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
        for name, number in (("max", limit), ("high", high), ("current", current)):
            text = number if number == "max" else number * GIB
            self.write(f"sys/fs/cgroup/{folder}/memory.{name}", text)
        self.write(
            f"sys/fs/cgroup/{folder}/memory.stat",
            f"anon 5\ninactive_file {inactive * GIB}\nactive_file {active * GIB}",
        )

    def v1(self, folder, limit, usage, cache=0, above=None):
        folder = f"sys/fs/cgroup/memory/{folder}"
        none = 9223372036854771712
        self.write(f"{folder}/memory.limit_in_bytes", none if limit is None else limit * GIB)
        self.write(f"{folder}/memory.usage_in_bytes", usage * GIB)
        self.write(
            f"{folder}/memory.stat",
            f"inactive_file 7\ntotal_inactive_file {cache * GIB}\n"
            f"hierarchical_memory_limit {(above or limit or 1 << 33) * GIB}",
        )

    @property
    def left(self):
        return left(str(self.root)) / GIB


def test_unreadable_limits_are_unknown(tmp_path):
    assert left(str(tmp_path)) == UNKNOWN
    assert share_of_rank(SingleProcess(), str(tmp_path)) == UNKNOWN
    Machine(tmp_path, None).write("proc/meminfo", "MemAvailable: many")
    assert left(str(tmp_path)) == UNKNOWN


JOB, BOX = "slurm/job_7", "kube/pod/box"


@pytest.mark.parametrize(
    "own, groups, expected",
    [
        ("/", [], 1500),
        # 2 are used, and 6 of the 8 that the kernel counts are file cache
        ("/", [("", 22, 8, 4, 2)], 20),
        ("/pod", [("pod", 22, 2, 0, 0, 20)], 18),  # memory.high
        ("/pod", [("pod", 5, 9)], 0),  # exceeded
        # every parent group counts
        (f"/{JOB}/task", [("slurm", "max", 50), (JOB, 100, 40), (f"{JOB}/task", 200, 30)], 60),
        (f"/{JOB}/task", [("slurm", "max", 50), (JOB, 100, 40), (f"{JOB}/task", 50, 30)], 20),
        (f"/{JOB}/task", [(JOB, 100, 40), (f"{JOB}/task", "max", 30)], 60),
        (f"/{JOB}/task", [(JOB, "max", 40), (f"{JOB}/task", "max", 30)], 1500),
    ],
)
def test_the_least_of_the_host_and_of_all_groups_is_left(tmp_path, own, groups, expected):
    machine = Machine(tmp_path)
    machine.group(f"1:name=systemd:/\n0::{own}", V2)
    for group in groups:
        machine.v2(*group)
    assert machine.left == expected


@pytest.mark.parametrize(
    "own, above, groups, expected",
    [
        (f"/{BOX}", "/", [("", None, 300), ("kube/pod", 30, 10, 3), (BOX, None, 9)], 23),
        # a container that sees its own group as the top: the limit of the parent groups is still
        # in memory.stat
        ("/docker/3f", "/docker/3f", [("", None, 9, 0, 22)], 13),
        # a path of another namespace is where it is mounted
        ("/../../elsewhere", "/", [("", 22, 2)], 20),
        ("/docker/3f", "/", [("", 22, 2)], 20),
    ],
)
def test_version_1(tmp_path, own, above, groups, expected):
    machine = Machine(tmp_path)
    machine.group(f"11:cpu,cpuacct:{own}\n4:memory:{own}\n0::/", V1.format(above=above))
    for group in groups:
        machine.v1(*group)
    assert machine.left == expected


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
    machine.v2("", 22, 2)
    assert Ranks(8).run(lambda group: share(group, [machine] * 8)) == pytest.approx(
        [20 * 0.9 / 8] * 8
    )


@pytest.mark.usefixtures("kernel")
def test_containers_of_one_host_share_the_host_and_have_limits_of_their_own(tmp_path):
    machines = [Machine(tmp_path / name, 100) for name in "ab"]
    for machine, limit in zip(machines, (100, 30), strict=True):
        machine.group("0::/", V2)
        machine.v2("", limit, 0)
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

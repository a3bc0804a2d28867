"""Folders that all nodes see, by SHARED_PATHS and by the type of the file system."""

import os

import pytest

from mindresume.storage.mounts import Mount, is_local, is_shared, mounts, within


@pytest.mark.parametrize(
    "path, named, shared",
    [
        ("/data/job", "/data", True),
        ("/data", "/data", True),
        ("/data", "/data/", True),
        ("/data01/job", "/data", False),
        ("/data/job", "/data/job/output", False),
        ("/mnt/b/x", "/mnt/a,/mnt/b", True),
        ("/mnt/b/x", "/mnt/a, /mnt/b ,", True),
        ("/mnt/c/x", "/mnt/a,/mnt/b", False),
        ("/x", "", False),
        ("/x", ",", False),
        ("/x", "/", True),
        ("/data/../x", "/data", False),
    ],
)
def test_shared_paths_are_compared_by_components(path, named, shared):
    assert is_shared(path, named, []) is shared


def test_links_are_followed(tmp_path):
    real = tmp_path / "real"
    (real / "job").mkdir(parents=True)
    os.symlink(real, tmp_path / "link")
    assert is_shared(str(tmp_path / "link" / "job"), str(real), []) and is_shared(
        str(real / "job"), str(tmp_path / "link"), []
    )


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_shared("output", str(tmp_path), []) and is_shared(str(tmp_path / "output"), ".", [])


@pytest.mark.parametrize(
    "kind, shared",
    [
        *(
            (kind, True)
            for kind in (
                "nfs",
                "nfs4",
                "NFS4",
                "dpc",
                "lustre",
                "gpfs",
                "beegfs",
                "ceph",
                "fuse.ceph-fuse",
                "fuse.sshfs",
                "fuse.glusterfs",
                "fuse.juicefs",
                "cifs",
            )
        ),
        *(
            (kind, False)
            for kind in ("ext4", "overlay", "tmpfs", "xfs", "fuse", "fuse.unknown", "nfsd")
        ),
    ],
)
def test_file_system_types(kind, shared):
    table = [Mount("/", "overlay"), Mount("/mnt/share", kind)]
    assert is_shared("/mnt/share/job", "", table) is shared
    assert not is_shared("/mnt/share01/job", "", table) and not is_shared("/mnt", "", table)


@pytest.mark.parametrize(
    "kind, local",
    [
        ("ext4", True),
        ("overlay", True),
        ("tmpfs", True),
        ("nfs4", False),
        ("fuse.juicefs", False),
        ("9p", False),
        ("virtiofs", False),
        ("fuse", False),
    ],
)
def test_local_disks(kind, local):
    assert is_local("/mnt/disk/job", [Mount("/", "xfs"), Mount("/mnt/disk", kind)]) is local
    assert not is_local("/mnt/disk", [])


def test_the_deepest_mount_decides_and_of_two_at_one_place_the_later():
    table = [
        Mount("/", "ext4"),
        Mount("/mnt", "nfs4"),
        Mount("/mnt/local", "xfs"),
        Mount("/both", "xfs"),
        Mount("/both", "lustre"),
    ]
    assert (
        is_shared("/mnt/job", "", table)
        and not is_shared("/mnt/local/job", "", table)
        and is_shared("/both/job", "", table)
    )
    assert is_shared("/anything", "", [Mount("/", "nfs4")])  # a diskless node


def test_the_table_of_the_kernel(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(
        "srv:/a /mnt/with\\040space nfs4 rw 0 0\nbroken\nproc /proc proc rw 0 0\n", encoding="utf-8"
    )
    assert mounts(str(table)) == [Mount("/mnt/with space", "nfs4"), Mount("/proc", "proc")]
    assert mounts(str(tmp_path / "none")) == []
    # of the kernel: a chroot need not list "/"
    assert all(mount.point.startswith("/") for mount in mounts())


def test_within():
    assert (
        within("/a/b", "/a")
        and within("/a", "/a")
        and within("/a", "/")
        and not within("/ab", "/a")
        and not within("/", "/a")
    )

"""Folders that all nodes see, by SHARED_PATHS and by the type of the file system."""

import pytest

from mindresume.storage import posix as module
from mindresume.storage.posix import Mount, is_local, is_shared, mounts


@pytest.fixture(autouse=True)
def mount(monkeypatch):
    """Mounts nothing. Returns a function that mounts file systems: (mount point, type)."""

    def mount(*rows):
        monkeypatch.setattr(module, "mounts", lambda: [Mount(*row) for row in rows])

    mount()
    return mount


@pytest.mark.parametrize(
    "path, named, shared",
    [
        ("/data/job", "/data", True),
        ("/data", "/data/", True),
        ("/data01/job", "/data", False),
        ("/data/job", "/data/job/output", False),
        ("/mnt/b/x", "/mnt/a, /mnt/b ,", True),
        ("/mnt/c/x", "/mnt/a,/mnt/b", False),
        ("/x", ",", False),
        ("/x", "/", True),
        ("/data/../x", "/data", False),
    ],
)
def test_shared_paths_are_compared_by_components(path, named, shared):
    assert is_shared(path, named) is shared


def test_links_are_followed_and_relative_paths_resolved(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "job").mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.chdir(real)
    for path, named in ((link / "job", real), (real / "job", link), ("job", real), (real, ".")):
        assert is_shared(str(path), str(named))


@pytest.mark.parametrize(
    "kind, shared, local",
    [
        *((kind, True, False) for kind in ("nfs", "NFS4", "dpc", "lustre", "fuse.juicefs")),
        *((kind, False, True) for kind in ("ext4", "overlay", "tmpfs")),
        *((kind, False, False) for kind in ("fuse", "fuse.unknown", "nfsd", "9p", "virtiofs")),
    ],
)
def test_file_system_types(mount, kind, shared, local):
    assert not is_local("/mnt/share")
    mount(("/", "overlay"), ("/mnt/share", kind))
    assert is_shared("/mnt/share/job") is shared and is_local("/mnt/share/job") is local
    assert not is_shared("/mnt/share01/job") and not is_shared("/mnt")


def test_the_deepest_mount_decides_and_of_two_at_one_place_the_later(mount):
    two = ("/both", "xfs"), ("/both", "lustre")
    mount(("/", "ext4"), ("/mnt", "nfs4"), ("/mnt/local", "xfs"), *two)
    found = [is_shared(path) for path in ("/mnt/job", "/mnt/local/job", "/both/job")]
    assert found == [True, False, True]
    mount(("/", "nfs4"))  # a diskless node
    assert is_shared("/anything")


def test_the_table_of_the_kernel(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(
        "srv:/a /mnt/with\\040space nfs4 rw 0 0\nbroken\nproc /proc proc rw 0 0\n", encoding="utf-8"
    )
    assert mounts(str(table)) == [Mount("/mnt/with space", "nfs4"), Mount("/proc", "proc")]
    assert mounts(str(tmp_path / "none")) == []
    # of the kernel: a chroot need not list "/"
    assert all(mount.point.startswith("/") for mount in mounts())

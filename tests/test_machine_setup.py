"""scripts/machine.sh: missing programs are installed or named, and nothing is printed if everything
is installed."""

import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "machine.sh"


@pytest.fixture
def shell(tmp_path):
    """Returns shell(code, uid, with_apt), which runs ``code`` after machine.sh on a machine whose
    apt-get creates ``installed`` from the second attempt on and writes its arguments to
    ``apt.log``."""

    def run(code, uid=0, with_apt=True, **env):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        stubs = {"id": f"echo {uid}"}
        if with_apt:
            stubs["apt-get"] = (
                f"echo $* >>{tmp_path}/apt.log; [ -e {tmp_path}/lists ] && : "
                f">{tmp_path}/installed; "
                f"[ $1 = update ] && : >{tmp_path}/lists; [ -e {tmp_path}/lists ]"
            )
        for name, body in stubs.items():
            (programs / name).write_text(f"#!/bin/bash\n{body}\n")
            (programs / name).chmod(0o755 | stat.S_IXUSR)
        search = str(programs) if not with_apt else f"{programs}:/usr/bin:/bin"
        return subprocess.run(
            ["/bin/bash", "-c", f"set -euo pipefail; source {SCRIPT}; {code}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": search, **env},
        )

    return run


NEED = 'need_system "it is needed" some-deb some-rpm test -e installed'


def test_nothing_is_printed_when_everything_is_installed(shell, tmp_path):
    (tmp_path / "installed").touch()
    done = shell(NEED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not (
        tmp_path / "apt.log"
    ).exists()


def test_root_installs_it_and_fetches_the_lists_only_if_the_first_attempt_fails(shell, tmp_path):
    done = shell(NEED)
    assert done.returncode == 0 and "some-deb" in done.stderr
    assert [line.split()[0] for line in (tmp_path / "apt.log").read_text().splitlines()] == [
        "install",
        "update",
        "install",
    ]


@pytest.mark.parametrize(
    "case", [{"uid": 1000}, {"with_apt": False}, {"INSTALL_SYSTEM": "0"}], ids=str
)
def test_a_user_without_root_rights_gets_the_packages_to_install(shell, tmp_path, case):
    done = shell(NEED, **case)
    assert done.returncode == 1 and not (tmp_path / "apt.log").exists()
    assert (
        "some-deb" in done.stderr
        and "some-rpm" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )

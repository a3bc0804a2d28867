"""For the unit and the system tests alike."""

import os
import signal
import sys
from pathlib import Path

# Without bytecode, each process compiles what it imports anew: half of the CPU time of "import
# mindformers". Where Python must not write it beside the sources, it goes to a folder that is
# ignored by git.
if sys.dont_write_bytecode and not sys.pycache_prefix:
    sys.dont_write_bytecode, sys.pycache_prefix = (
        False,
        str(Path(__file__).parent / ".pytest_cache" / "bytecode"),
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # of all processes that the tests start
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# a loaded machine is no failure
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# and neither is a shell that started the tests in the background, which has its children ignore
# Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--soak",
        action="store_true",
        help="everything, where else a part is taken: st/ takes more than an hour longer, tests/ "
        "some minutes",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--soak"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(
                    pytest.mark.skip(
                        reason="takes long, and much of it is tested elsewhere: --soak"
                    )
                )


@pytest.fixture(scope="session")
def soak(request) -> bool:
    return request.config.getoption("--soak")

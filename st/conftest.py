"""What the system tests share: the device, the training data, and runs that several tests compare with."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from st.jobs import ONE_LAYER, ROOT, Run  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--device-target", default="CPU", choices=["CPU", "Ascend"],
                     help="Ascend: the same tests on real devices, without the CPU cluster")
    parser.addoption("--soak", action="store_true", help="everything, where else a part is taken: takes an hour longer")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--soak"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="takes long, and much of it is tested elsewhere: --soak"))


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device-target")


@pytest.fixture(scope="session")
def soak(request) -> bool:
    return request.config.getoption("--soak")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def graphs(tmp_path_factory) -> Path:
    """Where what was compiled is kept."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="session")
def whole_single(tmp_path_factory, data, device, graphs) -> Run:
    """The uninterrupted Qwen3 run of one process: 40 steps, saves at 5, 10 ... 40, keeps 3. Read it, do not change it."""
    return Run(tmp_path_factory.mktemp("whole_single"), "quickstart_qwen3.yaml", data, device=device,
               options=ONE_LAYER, graphs=graphs).start().ended()


@pytest.fixture(scope="session")
def whole_four(tmp_path_factory, data, device, graphs) -> Run:
    """The same on 4 processes, data parallel 2 x model parallel 2."""
    return Run(tmp_path_factory.mktemp("whole_four"), "quickstart_qwen3_dp2tp2.yaml", data, 4, device=device,
               options=ONE_LAYER, graphs=graphs).start().ended()


@pytest.fixture(scope="session")
def whole_two(tmp_path_factory, data, device, graphs) -> Run:
    """The same on 2 processes, data parallel."""
    return Run(tmp_path_factory.mktemp("whole_two"), "quickstart_qwen3_dp2tp2.yaml", data, 2, device=device,
               options=f"{ONE_LAYER} --parallel_config.model_parallel 1", graphs=graphs).start().ended()


@pytest.fixture(scope="session", params=[pytest.param("whole_two", id="2 ranks"),
                                         pytest.param("whole_four", id="4 ranks", marks=pytest.mark.soak)])
def whole_several(request) -> Run:
    return request.getfixturevalue(request.param)

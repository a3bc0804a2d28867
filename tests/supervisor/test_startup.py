"""supervisor/hang.py: the parts of a start have the names and the order that they have in the
report."""

from types import SimpleNamespace

import pytest

from mindresume.coordination import rank_heartbeat as hb
from mindresume.events import PHASES
from mindresume.supervisor.hang import startup_phases

ZERO = 1795324920.0
RESUMED = (
    (hb.STARTING, 1),
    (hb.JOINING, 12),
    (hb.SELECTING, 14),
    (hb.BUILDING, 15),
    (hb.COMPILING, 16),
    (hb.LOADING, 20),
    (hb.COMPILING, 24),
    (hb.FIRST_STEP, 30),
    (hb.TRAINING, 33),
)
NEW = (*RESUMED[:4], (hb.COMPILING, 16), (hb.SAVING, 33), (hb.TRAINING, 40))


def heartbeat(tmp_path, rows):
    """Returns the heartbeat of a rank that has entered phases, (phase, seconds after ZERO)."""
    now = [ZERO + rows[0][1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hb, "runtime", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
        made = hb.RankHeartbeat(str(tmp_path / "process_1.heartbeat"))
        for phase, at in rows[1:]:
            now[0] = ZERO + at
            made.enter(phase)
    return hb.read_heartbeat(made.path)


def shown(heartbeat):
    return [
        (phase.name, phase.begin - ZERO, phase.end - ZERO)
        for phase in startup_phases(heartbeat, ZERO)
    ]


@pytest.fixture
def started(monkeypatch):
    """Makes every process one that was started half a second after ZERO."""
    monkeypatch.setattr("mindresume.supervisor.hang.start_time", lambda ticks: ZERO + 0.5)


def test_the_graph_that_is_compiled_before_the_load_belongs_to_build(tmp_path, started):
    found = shown(heartbeat(tmp_path, RESUMED))
    # the order is that of the report
    assert [name for name, _, _ in found] == list(PHASES.values())[2:]
    assert found == [
        ("start", 0, 0.5),
        ("import", 0.5, 12),
        ("join", 12, 14),
        ("select", 14, 15),
        ("build", 15, 20),
        ("load", 20, 24),
        ("compile", 24, 30),
        ("first step", 30, 33),
    ]


def test_what_a_new_training_does_not_record_is_one_phase_and_a_save_is_none(tmp_path, started):
    assert shown(heartbeat(tmp_path, NEW))[-1] == ("build + load + compile + first step", 15, 33)


def test_a_trainer_that_compiles_nothing(tmp_path, started):
    rows = tuple(row for row in RESUMED if row[0] != hb.COMPILING)
    assert shown(heartbeat(tmp_path, rows))[-2:] == [
        ("load", 20, 30),
        ("compile + first step", 30, 33),
    ]


@pytest.mark.parametrize(
    "time, first",
    [
        (ZERO - 0.01, "import"),  # within the same tick as the command
        (None, "start + import"),  # not known
    ],
)
def test_when_the_process_was_started(tmp_path, monkeypatch, time, first):
    monkeypatch.setattr("mindresume.supervisor.hang.start_time", lambda ticks: time)
    assert shown(heartbeat(tmp_path, RESUMED))[0] == (first, 0, 12)

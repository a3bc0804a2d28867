"""When this process was started, and when its imports were done."""
import os
import subprocess
import sys
import time

from mindresume.mindformers import process_times


def test_the_start_of_this_process_was_before_now():
    assert 0 <= time.time() - process_times.process_started() < 1e7


def test_the_start_of_a_new_process(tmp_path):
    before = time.time()
    code = "from mindresume.mindformers.process_times import process_started; print(process_started())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert before - 0.1 <= float(done.stdout) <= time.time()


def test_the_first_mark_counts(monkeypatch):
    monkeypatch.setattr(process_times, "_imported", [])
    assert process_times.imported() is None
    process_times.mark_imported()
    first = process_times.imported()
    process_times.mark_imported()
    assert process_times.imported() == first <= time.time()

"""Who claims a folder, for the tests: this process, one that has died, one elsewhere; and a clock that only sleep moves."""
import subprocess
import sys
from dataclasses import replace

from folders import STORAGE

from mindresume.events import ignore
from mindresume.manifest import FOLDER, run_name
from mindresume.store.acquire import occupy
from mindresume.store.claim import SAVING, Claim, owner_of_this_process

ME = owner_of_this_process(SAVING, 4)
ELSEWHERE = replace(ME, host="node7", machine="another/1", pid=1)


class Time:
    """A clock that only ``sleep`` moves; ``also`` is called then."""

    def __init__(self, also=lambda now: None):
        self.now, self.also = 0.0, also

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.also(self.now)


def start(root, owner=ME, time=None, emit=ignore):
    time = time or Time()
    return occupy(STORAGE, str(root), owner, emit=emit, clock=time.clock, sleep=time.sleep)


def left_by(root, owner, sequence=1):
    claim = Claim(STORAGE, str(root), replace(owner, run=run_name(sequence, "0000aaaa")))
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    claim.publish()
    return claim


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    owner = replace(ME, pid=child.pid, started=12345)
    child.wait()
    return owner

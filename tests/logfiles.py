"""Logs for the tests, line by line as mindformers and mindresume write them."""
from __future__ import annotations

import time
from pathlib import Path

ZERO = time.mktime((2026, 11, 21, 20, 0, 0, 0, 0, -1))          # when all of them begin
RUNS = [f"{number:04d}-0000aaaa" for number in range(1, 30)]


class Log:
    """``at``: seconds since ZERO. ``printed``: as a worker prints it, else as it stands in info.log."""

    def __init__(self, printed: bool = False):
        self.lines: list[str] = []
        self.printed = printed

    def line(self, at: float, message: str, level: str = "INFO") -> Log:
        whole = int(at)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ZERO + whole)) + f",{round((at - whole) * 1000):03d}"
        self.lines.append(f"{stamp} - mindformers/home/output/log[mindformers/x.py:1] - {level} - {message}" if self.printed else
                          f"[{level}] {stamp} [mindformers/x.py:1] work: {message}")
        return self

    def ours(self, at: float, message: str) -> Log:
        return self.line(at, f"mindresume: {message}")

    def start(self, at: float) -> Log:
        return self.line(at, "..........Init Config..........")

    def over(self, at: float) -> Log:
        return self.line(at, ".........Training Over!.............")

    def fresh(self, at: float) -> Log:
        return self.ours(at, "fresh start: ./output/checkpoint does not exist; weights are initialised at random")

    def resume(self, at: float, step: int, run: str) -> Log:
        self.ours(at, f"resume from step {step}, epoch 1, rank_0/net_rank_0-1_{step}.safetensors, run {run}, 1 rank, every byte "
                      f"checked")
        return self.ours(at, f"continues after step {step} (epoch 0 done), global batch size 8, loss scale 1.0")

    def run(self, at: float, run: str) -> Log:
        return self.ours(at, f"run {run} saves to /home/output/checkpoint as net_rank_0-...")

    def loss(self, at: float, step: int, value: float | str = 4.0, seconds: float = 1.0, size: int = 10, sink: bool = False
             ) -> Log:
        value = value if isinstance(value, str) else f"{value:.6f}"
        loss = f"loss: {value}" if sink else f"loss:[{value}/{value}]"
        return self.line(at, f"{{ Epoch:[{(step - 1) // size + 1:3d}/  4], step:[{(step - 1) % size + 1:5d}/{size:5d}], {loss}, "
                             f"per_step_time: {int(seconds * 1000)}ms, lr: 1e-05, overflow cond: False, loss_scale: 1.0, "
                             f"global_norm: [0.8], train_throughput_per_npu: 0.000T")

    def steps(self, at: float, first: int, last: int, seconds: float = 1.0) -> Log:
        """Loss lines at the ends of the steps; the first of them begins at ``at``."""
        for step in range(first, last + 1):
            self.loss(at + (step - first + 1) * seconds, step, 6 - step / 100, seconds)
        return self

    def save(self, at: float, step: int, seconds: float = 0.5) -> Log:
        self.ours(at, f"step {step} committed: 1 rank, 12.4 MiB")
        return self.ours(at, f"saved step {step}, 12.4 MiB in {seconds:.2f} s")

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text, encoding="utf-8")
        return path


def two_lives(printed: bool = False) -> Log:
    """Killed behind step 8, of which 6 to 8 are lost; resumed from 5, finished at 10. 1 step takes 1 s, compiling 9."""
    log = Log(printed).start(0).fresh(1).run(2, RUNS[0]).loss(12, 1, 5.99, 10).steps(12, 2, 5).save(16.5, 5)
    log.steps(16.5, 6, 8)
    log.start(40).ours(41, "not resuming from step 8: the save never completed: no rank recorded what they wrote")
    log.resume(41, 5, RUNS[0]).run(42, RUNS[1]).loss(50, 6, 5.94, 8).steps(50, 7, 10).save(54.5, 10)
    return log.over(55)

"""One example of every event. ``PYTHONPATH=.:tests python -m events.examples`` writes the tables of
docs/events.md and docs/events.zh.md."""

import json
from collections.abc import Iterable
from pathlib import Path

from mindresume import events as ev
from mindresume.formatting import shown

DOCS = Path(__file__).parents[2] / "docs"
# {page: heads of its table, and the cell of an event without a line in the log}
WORDS = {
    "events.md": (("event", "in the event file", "in the log"), "(not logged)"),
    "events.zh.md": (("事件", "事件文件中", "日志中"), "（不写入日志）"),
}
BEGIN, END = "<!-- examples: made by tests/events/examples.py -->", "<!-- end of examples -->"
EXAMPLES = (
    ev.TrainingStarted("node-0", 4711, 8, "0.1.0", 3600, 1795324920.0, 1795324941.5),
    ev.RunOpened("3-5f0c21aa", "/data/output/checkpoint", "qwen3_rank_0-3", 8, 500, 10),
    ev.LeaseWatched(
        "/data/output/checkpoint/.mindresume/claim-2-5f0c21aa.json", "2-5f0c21aa", "node-7", 45.0
    ),
    ev.StaleLeaseRemoved("2-5f0c21aa", "node-7", 4242),
    ev.CandidateRefused(
        600, "the save never completed: 7 of 8 ranks recorded what they wrote, missing: rank 5"
    ),
    ev.CandidateRefused(
        500,
        "the file of rank 1 has 512 bytes, 1024 were written",
        "rank_1/qwen3_rank_1-500_1.safetensors",
    ),
    ev.CheckpointSelected(
        400,
        1,
        "2-5f0c21aa",
        "/data/output/checkpoint",
        "8 ranks of run 2-5f0c21aa, every byte verified",
    ),
    ev.CheckpointSelected(
        410,
        1,
        "2-5f0c21aa",
        "/dev/shm/mindresume-1000/91c2e0d4a6b3f758",
        "in memory of the nodes",
        source=ev.MEMORY,
    ),
    ev.VisibilityWaited(12.0),
    ev.VisibilityWaited(
        65.0, ("rank 1 sees /data/output/checkpoint/.mindresume/step-0000000500-run-0002-5f0c21aa",)
    ),
    ev.VerifiedBytesKept(4 << 30, 1 << 30, 4 << 30),
    ev.FreshStart(
        "/data/output/checkpoint",
        "holds no checkpoint that was ever complete",
        "are initialised at random",
    ),
    ev.WeightsLoaded(0, 311, 5 << 30, 5 << 30, "step 400", 11.2),
    ev.ProgressRestored(200, 1, 400, 0.5, 64, 1024.0),
    ev.ResumeProved(
        200,
        311,
        37,
        37,
        0,
        0.0,
        ("batch", "learning_rate", "loss", "samples"),
        sampled_tensors=220,
        compared_bytes=96 << 20,
        weight_bytes=5 << 30,
    ),
    ev.ResumeDiffers(31, "batch", "0001-aaaa", "step 31, batch 5", "step 31, batch 6"),
    ev.Resumed(
        200,
        (
            ("step", "recomputed", "400 * 32 / 64 = 200"),
            ("random state", "restored", "mindspore, numpy"),
        ),
        12.5,
        37,
        420.0,
    ),
    ev.NetworkCompiled(),
    ev.FirstStepDone(401),
    ev.SaveBegun(500),
    ev.SaveStaged(500, "qwen3_rank_0-3-500_1.safetensors", 0.412),
    ev.SaveNotStaged(
        500, "it needs 5120 MiB of staging memory; the budget (mindresume.staging_gib) is 4096 MiB"
    ),
    ev.SaveWritten(500, 5 << 30, 21.4, 0.412),
    ev.SaveCommitted(500, 8, 40 << 30),
    ev.SaveCommitted(600, 8, 40 << 30, "2-5f0c21aa"),
    ev.CommitDelayed(
        600, "rank_3/qwen3_rank_3-600_1.safetensors: recorded 1024 bytes, found no file"
    ),
    ev.WriterDied("process", "exit status -9", 600),
    ev.SaveFailed(600, "step 600 was not saved on rank 3: no space left on device", 1),
    ev.SaveSkipped(700, "the previous save is still being written", 1),
    ev.SaveAbandoned(600, "no record of rank 3 within 600 s; a resume takes an older step", (3,)),
    ev.TierSaved(510, 5 << 30, 0.391, 0.62),
    ev.TierRefused(520, "no space left on device", 1),
    ev.TierRefused(None, "rank 0: its slots need 10240 MiB; each of 8 ranks has in /dev/shm 8 MiB"),
    ev.CheckpointsRemoved((100, 200), "/data/output/checkpoint", "the newest 3"),
    ev.CheckpointsRemoved((300, 350), "/data/output/checkpoint", is_incomplete=True),
    ev.RemovalPostponed(
        "/data/output/checkpoint/.mindresume/step-0000000300-run-2-5f0c21aa",
        "loading by process 7 on host node-0",
        300,
    ),
    ev.UploadFinished(500, "s3://bucket/run/checkpoint", 5 << 30, 31.0),
    ev.UploadFinished(500, "s3://bucket/run/checkpoint", 5 << 30, is_whole=False),
    ev.UploadFailed(
        600,
        "step 600 is not uploaded: s3://bucket/run/checkpoint/... could not be written: Connection "
        "reset",
        1,
    ),
    ev.UploadsSkipped((600, 700), 2),
    ev.CheckpointFetched(400, "s3://bucket/run/checkpoint", 5 << 30, 40 << 30, 31.0),
    ev.WorkProgress("saving step 500", 12 << 30, 80 << 30, 6.0),
    ev.WorkProgress("looking at files", 1200, 0, 6.0, "files"),
    ev.PreemptionRequested(710, "SIGTERM"),
    ev.TrainingEnded(ev.FINISHED, step=1000),
    ev.TrainingEnded(ev.PREEMPTED, "SIGTERM", 710),
    ev.TrainingEnded(
        ev.NOTHING_TO_TRAIN,
        "step 1000 is the end of 1 epoch of 1000 steps; for more, raise runner_config.epochs",
    ),
    ev.TrainingEnded(ev.FAILED, "ValueError: the loss is not finite", 812),
    ev.SupervisorStarted(
        "node-0", 4700, "0.1.0", ("bash", "scripts/msrun_launcher.sh", "run_mindformer.py ...", "8")
    ),
    ev.SupervisorStarted("node-1", 4700, "0.1.0", ("msrun", "..."), 1, 2),
    ev.NodesJoined(3, (0, 1), 4.0),
    ev.NodesJoined(4, (0, 1), 304.0, (2,)),
    ev.OrphansEnded((4501, 4502)),
    ev.JobStarted(2, 4705),
    ev.StartupMeasured(
        2,
        3,
        ("start", "import", "join", "select + build", "load", "compile", "first step"),
        (1.0, 11.5, 2.5, 1.5, 4.0, 6.5, 2.5),
        400,
    ),
    ev.RankDied(2, "node-0", 4714, 3, -9, "training", 437),
    ev.RankDied(2, "node-0", 4714, 3, 1, "loading", log=("ValueError: the loss is not finite",)),
    ev.HangDetected(
        2,
        "node-0",
        (3, 0),
        1800.0,
        "training",
        437,
        ("/data/output/mindresume_events/stacks-4700-start_2-rank_3-4714.txt",),
    ),
    ev.JobEnded(2, 137, "rank 3 was killed by SIGKILL", 912.0, 1.4, 400, 437, 430),
    ev.JobEnded(2, 124, "rank 3 made no progress", 2712.0, 63.0, left_behind=(4714,)),
    ev.JobRestarted(3, 0.0, "rank 3 was killed by SIGKILL"),
    ev.LogsKept(2, ("/data/output/msrun_log/earlier/20261123T152001-node_0-start_2",)),
    ev.JobRestarted(4, 2.0, "rank 3 was killed by SIGKILL", 2),
    ev.GaveUp(
        137, "6 starts in a row made no progress", 6, ("start 1, 2026-11-23 05:22:00, 912 s: ...",)
    ),
    ev.SupervisorEnded(0, "it finished", 3),
    ev.Notice(
        "/data/output holds no checkpoints itself; those in /data/output/checkpoint are used"
    ),
    ev.warning("the uploader is off: no space left on device"),
)


def examples() -> Iterable[list[ev.Event]]:
    """Returns the examples of each kind, for the pages."""
    found: dict[str, list[ev.Event]] = {}
    for event in EXAMPLES:
        found.setdefault(event.kind, []).append(event)
    return found.values()


def table(page: str) -> str:
    """Returns the table of a page: event, its lines in the event file, and its lines in the log."""
    heads, not_logged = WORDS[page]
    rows = [f"| {' | '.join(heads)} |", "|---|---|---|"]
    for events in examples():
        values = [
            json.dumps({key: value for key, value in event.to_json().items() if key != "event"})
            for event in events
        ]
        logs = [
            f"{event.log_level.upper()} {event.line()}" if event.line() else not_logged
            for event in events
        ]
        log = shown("\n".join(logs), keep="\n").replace("\n", "<br>")
        rows.append(
            f"| `{events[0].kind}` | {'<br>'.join(f'`{each}`' for each in values)} | {log} |"
        )
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Returns the text of a page with the current table."""
    before, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table(page)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in WORDS:
        (DOCS / name).write_text(with_table(name), encoding="utf-8")

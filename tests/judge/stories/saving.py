"""All ways to save, by the CheckpointMonitor in the real Trainer, in one process."""

from tests.judge.case import Case, Train
from tests.judge.folders import copy, folder_at, lease, remove, show, trained, uploads, write

C = "output/checkpoint"
EPOCHS_3 = {"runner_config.epochs": 3}
TWO = {"use_legacy_format": False}
MEMORY = {
    "mindresume.memory_tier.every_steps": 6,
    "mindresume.memory_tier.dir": "TMP/memory",
    "mindresume.heartbeat": 3600,
}
IN_MEMORY = tuple(
    {"step": step + 1, "do": "wait", "path": f"memory/**/step-{step:010d}-*/rank_00000.json"}
    for step in (6, 12, 18)
)

CASES = [
    Case(
        "1.0",
        trained("1.0", transcript=True),
        show(f"{C}/rank_0/meta.json"),
        show(f"{C}/.mindresume/*20-run*/*.json"),
    ),
    Case("1.0 ckpt", trained("1.0 ckpt", transcript=True)),
    Case(
        "2.0",
        trained("2.0", transcript=True),
        show(f"{C}/iteration_00000020/common.json"),
        show(f"{C}/latest*"),
        show(f"{C}/iteration_00000020/.mindresume/*/*.json"),
    ),
    Case("killed", trained("killed", transcript=True), show(f"{C}/.mindresume/claim-*")),
    # ---- in the background
    Case(
        "1.0 ckpt by a process",
        Train(
            {"monitor.async_save": "process", "monitor.checkpoint_format": "ckpt"}, ordered=False
        ),
        f"verify {C}",
    ),
    Case(
        "2.0 in the background",
        Train({**TWO, "monitor.async_save": True}, ordered=False),
        f"verify {C}",
    ),
    # ---- what stays
    Case(
        "every second step, the last two, one every ten",
        Train(
            {
                "monitor.save_checkpoint_steps": 2,
                "monitor.keep_checkpoint_max": 2,
                "mindresume.keep_every_steps": 10,
            }
        ),
        f"ls {C}",
    ),
    Case(
        "the best by a reported metric",
        Train(
            {
                "monitor.keep_checkpoint_max": 1,
                "mindresume.keep_best": 1,
                "mindresume.keep_best_metric": "score",
                "mindresume.keep_best_mode": "max",
            },
            actions=(
                {"step": 2, "do": "metric", "name": "score", "value": 1.5},
                {"step": 7, "do": "metric", "name": "score", "value": 3},
                {"step": 12, "do": "metric", "name": "score", "value": 2},
            ),
        ),
        f"ls {C}",
        f">>> {{step: dict(mindresume.open('{C}')[step].state.metrics)['score'] for step in "
        f"mindresume.open('{C}').steps()}}",
    ),
    # ---- a step that is saved again, another training, another job
    Case(
        "a step again, after going back by name",
        trained("1.0"),
        Train({**EPOCHS_3, "resume_training": "net_rank_0-1_10"}),
        f"ls {C}",
    ),
    Case(
        "2.0 a step again, after the tracker was set back",
        trained("2.0"),
        write(f"{C}/latest_checkpointed_iteration.txt", "10"),
        Train({**TWO, **EPOCHS_3}),
        f"ls {C}",
    ),
    Case(
        "2.0 a fresh training in the folder of another",
        trained("2.0"),
        Train({**TWO, "load_checkpoint": "", "resume_training": False}),
        f"ls {C}",
    ),
    Case(
        "a job on another host gave no sign for long", folder_at(C), lease(C, every=0.05), Train()
    ),
    Case(
        "another job saves there",
        Train({"mindresume.heartbeat": 0.5}, actions=({"step": 7, "do": "stop"},)),
        f"ls {C}",
        Train(),
    ),
    Case(
        "leftovers of a killed job",
        trained("killed"),
        copy(
            f"{C}/rank_0/net_rank_0-2_5.safetensors",
            f"{C}/rank_0/.net_rank_0-2_10.safetensors.0001-0000abcd.mindresume-tmp",
        ),
        copy(
            f"{C}/.mindresume/step-0000000005-*",
            f"{C}/.mindresume/trash-step-0000000002-run-0001-0000abcd.0000cdef",
        ),
        remove(f"{C}/.mindresume/step-0000000010-*/manifest.json"),
        Train(),
    ),
    # ---- saves that fail, trainings that end early
    Case(
        "the folder cannot be written for a while",
        Train(
            actions=(
                {"step": 7, "do": "block", "path": f"{C}/rank_0"},
                {"step": 12, "do": "unblock", "path": f"{C}/rank_0"},
            )
        ),
        f"ls {C}",
    ),
    Case(
        "a failed save ends the training",
        Train(
            {"mindresume.on_save_error": "raise"},
            actions=({"step": 7, "do": "block", "path": f"{C}/rank_0"},),
        ),
    ),
    Case(
        "SIGTERM",
        Train(
            {"mindresume.preemption_check_interval": 0.001},
            actions=({"step": 7, "do": "terminate"},),
        ),
        f"which {C}",
    ),
    # ---- memory, bucket
    Case(
        "into memory, to disk by flush",
        folder_at("memory"),
        Train(MEMORY, actions=(*IN_MEMORY, {"step": 19, "do": "kill"}), ordered=False),
        f"ls {C}",
        f"which {C}",
        f"verify {C}",
        f"flush {C}",
        f"which {C}",
        f"flush {C} --json",
    ),
    Case(
        "into memory, to disk after an error",
        folder_at("memory"),
        Train(MEMORY, actions=(*IN_MEMORY, {"step": 19, "do": "fail"}), ordered=False),
        f"which {C}",
    ),
    Case(
        "uploaded",
        trained("uploaded", transcript=True),
        copy("output/bucket/checkpoint/step-0000000020-*", "copied"),
        "which copied",
    ),
    Case(
        "2.0 uploaded",
        Train(
            {**TWO, "remote_save_url": "file://TMP/bucket", "monitor.keep_checkpoint_max": 1},
            actions=uploads("bucket"),
            ordered=False,
        ),
    ),
    # ---- beside
    Case(
        "weights for inference",
        Train({"monitor.save_network_params": True, "monitor.save_trainable_params": True}),
    ),
    Case(
        "wrong settings",
        Train({"mindresume.keep_bestt": 1}),
        Train({"monitor.keep_max": 1}),
        Train({"monitor.keep_checkpoint_per_n_minutes": 5}),
    ),
]

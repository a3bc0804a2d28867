"""What a training continues from: all sources of a resume, and what it refuses, by the real Trainer
in one process."""

from tests.judge.case import Case, Train
from tests.judge.folders import (
    copy,
    flip,
    flip_header,
    folder_at,
    remove,
    trained,
    truncate,
    unname,
    uploads,
    write,
)

C = "output/checkpoint"
NEWEST = f"{C}/rank_0/net_rank_0-2_10.safetensors"
TWO = {"use_legacy_format": False}
ON = {"runner_config.epochs": 3}
SIZES = {"model.model_config.hidden_size": 4, "model.model_config.vocab_size": 4}
MEMORY = {
    "mindresume.memory_tier.every_steps": 6,
    "mindresume.memory_tier.dir": "TMP/memory",
    "mindresume.heartbeat": 3600,
}
KILLED = (
    *(
        {"step": step + 1, "do": "wait", "path": f"memory/**/step-{step:010d}-*/rank_00000.json"}
        for step in (6, 12, 18)
    ),
    {"step": 19, "do": "kill"},
)
BUCKET = {"remote_save_url": "file://TMP/output/bucket"}
SLOW = uploads("output/bucket", (25,))
OLDER = uploads("output/bucket", (20, 25), "run-0002-")

CASES = [
    # ---- the shared disk
    Case("the newest", trained("1.0"), Train(ON)),
    Case("older, the newest rotted", trained("1.0"), flip(NEWEST), Train(ON)),
    Case(
        "older, damaged as a scrub found",
        trained("1.0"),
        flip(NEWEST),
        f"scrub {C}",
        Train({**ON, "mindresume.verify": "quick"}),
    ),
    Case(
        "quick verification, rot is found by the load",
        trained("1.0"),
        flip(NEWEST),
        Train({**ON, "mindresume.verify": "quick"}),
    ),
    Case("none can be used", trained("1.0"), truncate(f"{C}/rank_0/*.safetensors"), Train(ON)),
    Case(
        "one file", trained("1.0"), Train({**ON, "load_checkpoint": NEWEST.replace("2_10", "2_5")})
    ),
    Case("ckpt, another format asked for", trained("1.0 ckpt"), Train(ON)),
    Case("2.0 committed, not named", trained("2.0"), unname(20), Train(TWO)),
    Case("1.0 in a job of 2.0", trained("1.0"), Train({**TWO, **ON})),
    # ---- memory
    Case(
        "memory",
        folder_at("memory"),
        Train(MEMORY, actions=KILLED, ordered=False),
        Train(MEMORY, ordered=False),
    ),
    Case(
        "memory that rotted",
        folder_at("memory"),
        Train(MEMORY, actions=KILLED, ordered=False),
        flip("memory/*/*/rank_0/*-2_8.*"),
        f"verify {C}",
        f"which {C}",
    ),
    # ---- a bucket
    Case(
        "a bucket, the disk is empty",
        trained("uploaded"),
        remove(C),
        Train({**ON, **BUCKET}, actions=SLOW, ordered=False),
    ),
    Case(
        "a bucket, its newest rotted",
        trained("uploaded"),
        remove(C),
        flip("output/bucket/checkpoint/step-0000000020-*/rank_0/*"),
        Train({**ON, **BUCKET}, actions=OLDER, ordered=False),
    ),
    # ---- of other layouts and formats
    Case(
        "of two ranks",
        trained("1.0"),
        f"convert {C} two --to dp=2",
        Train({**ON, "load_checkpoint": "two"}),
        Train({**ON, "load_checkpoint": "two", "auto_trans_ckpt": True}),
    ),
    Case(
        "consolidated",
        trained("1.0"),
        f"merge {C} merged",
        Train({**ON, "load_checkpoint": "merged", "auto_trans_ckpt": True}),
    ),
    Case(
        "consolidated, its header was altered",
        trained("1.0"),
        f"merge {C} merged",
        flip_header("merged/part0.safetensors"),
        Train({**ON, "load_checkpoint": "merged", "auto_trans_ckpt": True}),
    ),
    # ---- mindformers
    Case("of mindformers alone", trained("mindformers", transcript=True), Train(ON)),
    Case(
        "2.0 of mindformers alone, and back",
        trained("mindformers 2.0", transcript=True),
        Train({**TWO, **ON}),
        Train({**TWO, "runner_config.epochs": 4}, plain=True),
    ),
    # ---- weights only
    Case(
        "weights only",
        trained("1.0"),
        copy(C, "weights"),
        Train({"load_checkpoint": "weights", "resume_training": False, "output_dir": "output"}),
    ),
    Case(
        "weights only, a parameter is missing",
        trained("1.0"),
        f"merge {C} merged --drop dense.bias --drop *.dense.bias",
        Train({"load_checkpoint": "merged", "resume_training": False}),
        Train(
            {
                "load_checkpoint": "merged",
                "resume_training": False,
                "mindresume.allow_missing": ["dense.b*"],
            }
        ),
    ),
    # ---- health, crash loops, data
    Case(
        "unhealthy: the newest, then all",
        trained("1.0"),
        write(
            "output/health_ckpts.json",
            '[{"is_health": 1, "ckpt_name": "net_rank_0-2_10.safetensors"}, '
            '{"is_health": 0, "ckpt_name": "net_rank_0-2_5.safetensors"}]',
        ),
        Train({**ON, "use_checkpoint_health_monitor": True, **SIZES}),
        write(
            "output/health_ckpts.json",
            "".join(
                [
                    '[{"is_health": 1, "ckpt_name": "net_rank_0-2_10.safetensors"}, ',
                    '{"is_health": 1, "ckpt_name": "net_rank_0-2_5.safetensors"}, ',
                    '{"is_health": 1, "ckpt_name": "net_rank_0-1_10.safetensors"}]',
                ]
            ),
        ),
        Train({**ON, "use_checkpoint_health_monitor": True, **SIZES}),
    ),
    Case(
        "a checkpoint after which a job died",
        trained("1.0"),
        Train({**ON, "mindresume.max_failed_loads": 1}, actions=({"step": "begun", "do": "kill"},)),
        Train({**ON, "mindresume.max_failed_loads": 1}),
    ),
    Case(
        "other data",
        trained("1.0"),
        Train(
            {
                **ON,
                "train_dataset.input_columns": ["x", "z"],
                "mindresume.on_dataset_change": "error",
            }
        ),
    ),
]

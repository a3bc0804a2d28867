"""Trainings of two ranks, and what takes longest: st/test_judge.py plays them."""

from tests.judge.case import Case, Train
from tests.judge.folders import copy, flip, folder_at, move, remove, trained, uploads, write

C = "output/checkpoint"
TWO = {"use_legacy_format": False}
ON = {"runner_config.epochs": 3}
MEMORY = {
    "mindresume.memory_tier.every_steps": 6,
    "mindresume.memory_tier.dir": "TMP/memory",
    "mindresume.heartbeat": 3600,
}
KILLED = (
    *(
        {
            "step": step + 1,
            "do": "wait",
            "path": f"memory/**/step-{step:010d}-*/rank_0000{rank}.json",
            "rank": rank,
        }
        for step in (6, 12, 18)
        for rank in (0, 1)
    ),
    {"step": 19, "do": "kill"},
)
ONCE = {"monitor.remove_redundancy": True, "remove_redundancy": True}
ALONE = tuple(action for action in KILLED if action.get("rank", 0) == 0)


def two(config=None, tp=1, **more):
    return Train(config or {}, ranks=2, tp=tp, ordered=False, **more)


CASES = [
    Case(
        "dp2, resumed from an older step, the newest rotted on one rank",
        two(),
        f"verify {C}",
        flip(f"{C}/rank_1/net_rank_1-2_10.safetensors"),
        two(ON),
    ),
    Case("dp2, the folder of a rank is lost", two(), remove(f"{C}/rank_1"), f"which {C}", two(ON)),
    Case("tp2 to one rank", two(tp=2), Train(ON), Train({**ON, "auto_trans_ckpt": True})),
    Case(
        "one rank to tp2",
        trained("1.0"),
        two({**ON, "auto_trans_ckpt": True}, tp=2),
        f"inspect {C}",
    ),
    Case("2.0 tp2 to dp2", two(TWO, tp=2), two({**TWO, **ON}), f"ls {C}"),
    Case("dp2 without redundancy", two(ONCE), f"inspect {C} --rank 1", two({**ON, **ONCE})),
    Case(
        "2.0 dp2 without redundancy, in the background",
        two({**TWO, "monitor.remove_redundancy": True, "monitor.async_save": True}),
        f"convert {C} one --to dp=1",
        f"diff {C} one",
    ),
    Case(
        "dp2, one rank cannot write for a while, both are killed",
        two(
            {"mindresume.heartbeat": 3600},
            actions=(
                {"step": 7, "do": "block", "path": f"{C}/rank_1", "rank": 1},
                {"step": 12, "do": "unblock", "path": f"{C}/rank_1", "rank": 1},
                {"step": 17, "do": "kill"},
            ),
        ),
        f"ls {C}",
        two(),
    ),
    Case(
        "dp2, SIGTERM of one rank",
        two(
            {"mindresume.preemption_check_interval": 0.001},
            actions=({"step": 7, "do": "terminate", "rank": 1},),
        ),
        f"ls {C}",
    ),
    Case(
        "dp2, memory, then memory of one rank rotted",
        folder_at("memory"),
        two(MEMORY, actions=KILLED),
        f"which {C}",
        flip("memory/**/rank_1/*-2_8.*"),
        f"verify {C}",
        two(MEMORY),
    ),
    Case(
        "2.0 memory, of a checkpoint folder that was copied",
        folder_at("memory"),
        Train({**TWO, **MEMORY}, actions=ALONE, ordered=False),
        move(C, "old"),
        copy("old", C),
        f"which {C}",
        Train({**TWO, **MEMORY}, ordered=False),
    ),
    Case(
        "dp2, uploaded",
        two({"remote_save_url": "file://TMP/bucket"}, actions=uploads("bucket")),
        remove(C),
        two({**ON, "remote_save_url": "file://TMP/bucket"}, actions=uploads("bucket", (25,))),
    ),
    Case(
        "in sink mode, then another batch size",
        Train(
            {
                "runner_config.sink_mode": True,
                "runner_config.sink_size": 2,
                "monitor.save_checkpoint_steps": 4,
            }
        ),
        f"ls {C}",
        Train({**ON, "runner_config.batch_size": 4}),
    ),
    Case(
        "a bucket that cannot be read",
        write("bucket", "a file"),
        Train({"remote_save_url": "file://TMP/bucket/x"}),
    ),
]

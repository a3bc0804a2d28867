"""LoRA (``pet_config``) in the graph trainer: a killed training continues exactly, from its own
checkpoints and after a begin with the weights of the base."""

import pytest

from st.run_attempts import in_parallel, steps_of, train, train_well
from st.training_run import FORMAT_2, Run, differences

pytestmark = pytest.mark.timeout(1200)
KILL = {"CPU_CLUSTER_KILL": "0@17"}
LORA = {
    "pet_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "target_modules": ".*linear_qkv|.*linear_proj|.*linear_fc1|.*linear_fc2",
    "freeze_include": ["*"],
    "freeze_exclude": ["*lora*"],
}


@pytest.fixture(scope="module", params=["", FORMAT_2], ids=["1.0", "2.0"])
def tuned(request, tmp_path_factory, data, device, graphs) -> tuple[Run, Run]:
    """Two fine-tunings of 20 steps: uninterrupted; and killed behind step 17, then resumed."""
    base = tmp_path_factory.mktemp("lora")
    runs = [
        Run(
            base / name,
            "quickstart_qwen3.yaml",
            data,
            device=device,
            options=f"--epochs 2 {request.param}".rstrip(),
            graphs=graphs,
        ).configure(
            {"model.model_config.pet_config": LORA, "model.model_config.num_hidden_layers": 1}
        )
        for name in ("whole", "broken")
    ]
    in_parallel(lambda: train_well(runs[0]), lambda: train(runs[1], **KILL))
    return runs[0], train_well(runs[1])


def test_a_killed_fine_tuning_is_the_uninterrupted_one(tuned):
    whole, broken = tuned
    assert steps_of(whole) == list(range(1, 21)) and steps_of(broken) == list(range(16, 21))
    assert differences(whole.steps(), broken.steps(-1)) == []


def test_a_fine_tuning_continues_after_a_begin_with_the_base(tuned, tmp_path):
    """The first start has the weights of the base, without adapters; the later ones have the
    checkpoints of the job."""
    base = tuned[0].like(tmp_path / "base").configure({"model.model_config.num_hidden_layers": 1})
    base.options = f"{base.options} --epochs 1"
    train_well(base)
    path = str(base.checkpoints)
    whole, broken = (tuned[0].like(tmp_path / name) for name in ("whole", "broken"))
    first = f"--load_checkpoint {path} --resume_training False"
    in_parallel(lambda: train_well(whole, first), lambda: train(broken, first, **KILL))
    train_well(broken)
    assert steps_of(broken) == list(range(16, 21))
    assert differences(whole.steps(), broken.steps(-1)) == []


def test_averaged_weights_continue(tmp_path, data, device, graphs):
    """PMA: the optimizer sums weights over several steps, and replaces them by their mean."""
    whole, broken = (
        Run(
            tmp_path / name,
            "quickstart_qwen3.yaml",
            data,
            device=device,
            options="--epochs 2",
            graphs=graphs,
        ).configure(
            {
                "model.model_config.num_hidden_layers": 1,
                "optimizer": {
                    "type": "PmaAdamW",
                    "betas": [0.9, 0.95],
                    "weight_decay": 0.01,
                    "fused_num": 3,
                    "interleave_step": 2,
                    "fused_algo": "sma",
                },
            }
        )
        for name in ("whole", "broken")
    )
    in_parallel(lambda: train_well(whole), lambda: train(broken, **KILL))
    train_well(broken)
    assert steps_of(broken) == list(range(16, 21))
    assert differences(whole.steps(), broken.steps(-1)) == []

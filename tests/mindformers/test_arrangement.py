"""How the elements within a tensor are ordered: what a network has, and which checkpoints it
refuses."""

from types import SimpleNamespace

import pytest

pytest.importorskip("mindformers.tools")

from mindspore import nn  # noqa: E402

from mindresume.errors import CollectiveError, ConfigError  # noqa: E402
from mindresume.mindformers import adapter, loading  # noqa: E402
from mindresume.mindformers.training_context import ResumePlan, TrainingContext  # noqa: E402
from mindresume.model.training_state import TrainingState  # noqa: E402
from mindresume.resume.eligible import Choice  # noqa: E402


class Network(nn.Cell):
    is_train_model = True

    def __init__(self, **config):
        super().__init__()
        self.given = SimpleNamespace(**config)

    def get_gpt_transformer_config(self):
        return self.given


class Wrapper(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network = network


KEYS = {"use_contiguous_weight_layout_attention": True, "use_interleaved_weight_layout_mlp": True}


def plan_of(saved, **paths):
    state = TrainingState(5, 10, 5, arrangement=saved) if saved is not None else None
    chosen = SimpleNamespace(
        state=state, **{"records_dir": ".mindresume/step", "iteration_dir": "", **paths}
    )
    return ResumePlan(choice=Choice(chosen, (), (), False, root="/run"))


@pytest.mark.parametrize(
    "network, expected",
    [
        (Network(**KEYS), KEYS),
        (Wrapper(Wrapper(Network(**KEYS))), KEYS),
        (Wrapper(nn.ReLU()), {}),
        (Network(), {}),
        (Network(**KEYS, multi_latent_attention=True), {"use_interleaved_weight_layout_mlp": True}),
        (Network(**KEYS, multi_latent_attention=False), KEYS),
    ],
)
def test_what_a_network_has(network, expected):
    assert adapter.arrangement_of(network) == expected


@pytest.mark.parametrize(
    "saved",
    [None, {}, KEYS, {"use_interleaved_weight_layout_mlp": True}, {"of a later release": False}],
)
def test_what_may_be_loaded(saved):
    loading.check_arrangement(plan_of(saved), KEYS)
    loading.check_arrangement(ResumePlan(), KEYS)
    loading.check_arrangement(ResumePlan(choice=Choice(None, (), (), True)), KEYS)
    # no such tensors
    loading.check_arrangement(plan_of({key: not value for key, value in KEYS.items()}), {})


@pytest.mark.parametrize(
    "paths, folder",
    [
        ({}, "/run/.mindresume/step"),
        ({"records_dir": None, "iteration_dir": "iteration_5"}, "/run/iteration_5"),
    ],
)
@pytest.mark.parametrize("key", KEYS)
def test_another_order_is_refused(key, paths, folder):
    with pytest.raises(ConfigError) as error:
        loading.check_arrangement(plan_of({**KEYS, key: False}, **paths), KEYS)
    text = str(error.value)
    assert text.startswith(f"{folder}:") and f"{key}: False, this one True" in text
    assert text.endswith(f"Set {key}: False in the model configuration")


def test_after_a_conversion_the_source_counts():
    plan = ResumePlan(
        None,
        plan_of(None).choice,
        plan_of({**KEYS, "use_interleaved_weight_layout_mlp": False}).choice,
    )
    with pytest.raises(ConfigError, match="use_interleaved_weight_layout_mlp"):
        loading.check_arrangement(plan, KEYS)


@pytest.mark.parametrize(
    "is_consolidated, recorded, expected",
    [
        (False, {}, KEYS),
        (
            False,
            {"use_interleaved_weight_layout_mlp": False},
            {**KEYS, "use_interleaved_weight_layout_mlp": False},
        ),
        (True, {}, {}),
    ],
)
def test_files_of_ranks_without_a_record_have_the_order_of_the_network(
    is_consolidated, recorded, expected
):
    weights = SimpleNamespace(is_consolidated=is_consolidated, arrangement=recorded, tensors={})
    network = SimpleNamespace(arrangement=KEYS, target=lambda stored, what: 1 / 0)
    with pytest.raises(CollectiveError, match="division"):  # it ends behind what is tested
        loading.load(network, TrainingContext(), SimpleNamespace(weights=weights, what=""))
    assert weights.arrangement == expected

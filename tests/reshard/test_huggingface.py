"""Weights seen in the other naming: what is read, how much of it, what is converted, and what is
refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from formats.test_huggingface import QKV
from huggingface_folders import (
    GROUPED,
    LATENT,
    MODELS,
    MOE,
    assemble,
    complete,
    document,
    folder_of,
    random,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.events import ignore
from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.huggingface import CONTIGUOUS, HEAD, inverse_rules, rules
from mindresume.model.layout import TensorLayout, held, whole
from mindresume.reshard.conversion_plan import to_consolidated
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Engine, check_source
from mindresume.reshard.huggingface import (
    NetworkModel,
    check_network,
    is_huggingface,
    is_no_weight,
    orders_of,
    read_model,
    to_huggingface,
    view_for_network,
    view_of_folder,
)
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import Traffic, cast, view
from mindresume.reshard.region_load import LoadTarget, read_regions, wanted_regions
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files.header import DTYPES

STORAGE = PosixStorage()
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"


def completed(folder, tensors):
    return open_checkpoint(STORAGE, str(complete(folder, tensors)))


def viewed(folder, model, **more):
    read = read_model(STORAGE, folder, model.attention, model.mlp, model.concatenated)
    return view_of_folder(STORAGE, folder, read, **more)


def everything(weights):
    return read_regions(
        weights, {name: whole(tensor.shape) for name, tensor in weights.tensors.items()}
    )


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(
            found[name].view(np.uint8), np.ascontiguousarray(array).view(np.uint8), name
        )


def bits(tensors, dtype):
    """``dtype`` by name: of ml_dtypes, whatever MindSpore registered under the same one."""
    return {name: array.astype(DTYPES[dtype]) for name, array in tensors.items()}


# ---- reading -------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_region(tmp_path, data):
    key = data.draw(
        st.sampled_from(
            ["grouped", "moe", "contiguous", "latent", "concatenated", "concatenated queries"]
        )
    )
    model, folder = MODELS[key], str(tmp_path / key)
    tensors = random(model)
    if not os.path.exists(folder):
        os.makedirs(folder)
        folder_of(Path(folder), model, tensors)
    weights = viewed(folder, model)
    name = data.draw(st.sampled_from(sorted(n for n in weights.tensors if ".layers.0." not in n)))
    region = []
    for size in weights.tensors[name].shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    found = read_regions(weights, {name: tuple(region)})[name]
    np.testing.assert_array_equal(found, view(assemble(rules(model), tensors)[name], region))


def read_network(
    storage, folder, shapes, layouts, rank, traffic=None, emit=ignore, share=None, **network
):
    """Returns {parameter: its slice} of a rank."""
    target = LoadTarget(shapes, layouts)
    weights = view_for_network(storage, folder, target, NetworkModel(**network), emit)
    regions = wanted_regions(
        weights,
        LoadTarget({name: row for name, row in shapes.items() if not is_no_weight(name)}, layouts),
        rank,
    )
    return read_regions(weights, share(regions) if share else regions, traffic=traffic)


def network_of(model, layout):
    """Returns the arguments of ``read_network`` for a rank of this layout: everything but vectors
    is cut by rows."""
    layouts = {
        name: (layout, rule.shape) for name, rule in rules(model).items() if len(rule.shape) == 2
    }
    return lambda rank, dtype: (
        {
            name: (
                tuple(stop - start for start, stop in held(layout, rank, rule.shape))
                if name in layouts
                else rule.shape,
                dtype,
            )
            for name, rule in rules(model).items()
        },
        layouts,
        rank,
    )


@pytest.mark.parametrize(
    "model, layout",
    [
        (GROUPED, TensorLayout((4,), (0, -1))),
        (GROUPED, TensorLayout((2, 2), (0, -1), 2)),
        (GROUPED, TensorLayout((2,), (-1, 0))),
        (MOE, TensorLayout((4,), (0, -1))),
        (MOE, TensorLayout((2,), (-1, 0))),
        (LATENT, TensorLayout((2, 2), (0, -1), 2)),
        (LATENT, TensorLayout((2,), (-1, 0))),
    ],
)
def test_each_rank_reads_its_slices(tmp_path, model, layout):
    """Where rows are cut, all ranks together read no byte twice, except replicas; also with whole
    experts."""
    tensors = random(model)
    folder, whole_ = folder_of(tmp_path / "hf", model, tensors), assemble(rules(model), tensors)
    arguments, read = network_of(model, layout), 0
    for rank in range(layout.stage_size):
        traffic = Traffic()
        found = read_network(STORAGE, folder, *arguments(rank, "float32"), traffic=traffic)
        read += traffic.read
        same(
            found,
            {
                name: view(array, held(layout, rank, array.shape)) if array.ndim == 2 else array
                for name, array in whole_.items()
            },
        )
    if layout.tensor_map[1] == -1:
        vectors = sum(array.nbytes for array in whole_.values() if array.ndim == 1)
        matrices = sum(array.nbytes for array in whole_.values() if array.ndim == 2)
        assert read == matrices * layout.copies + vectors * layout.stage_size


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stored, wanted",
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("model", [GROUPED, MOE])
def test_values_are_converted_while_they_are_read(tmp_path, model, stored, wanted):
    tensors = bits(random(model), stored)
    folder = folder_of(tmp_path / "hf", model, tensors)
    arguments = network_of(model, TensorLayout((1,), (-1, -1)))(0, wanted)
    expected = bits(assemble(rules(model), bits(tensors, "float32")), wanted)
    same(read_network(STORAGE, folder, *arguments), expected)


def test_float32_to_bfloat16_is_to_the_nearest_even():
    halves = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x80000001, 0x7F800000],
        np.uint32,
    )
    found = cast(halves.view(np.float32), "bfloat16").view(np.uint16)
    assert [hex(value) for value in found] == [
        "0x3f80",
        "0x3f82",
        "0x3f81",
        "0x3f80",
        "0x7f80",
        "0x8000",
        "0x7f80",
    ]
    assert np.isnan(cast(np.array([np.nan], np.float32), "bfloat16").astype(np.float32)).all()
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[~np.isnan(every.astype(np.float32))]
    assert (
        cast(cast(finite, "float32"), "bfloat16").view(np.uint16) == finite.view(np.uint16)
    ).all()


@pytest.mark.parametrize(
    "stored, wanted",
    [
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float64", "float32"),
        ("float32", "float16"),
        ("int8", "float32"),
    ],
)
def test_other_conversions_are_refused(tmp_path, stored, wanted):
    with pytest.raises(LoadError, match=f"{stored} is not converted to {wanted}"):
        cast(np.zeros(2, DTYPES[stored]), wanted)
    tensors = random(GROUPED)
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors[
        "model.layers.1.self_attn.k_proj.weight"
    ].astype(DTYPES[stored])
    folder = folder_of(tmp_path / "hf", GROUPED, tensors)
    with pytest.raises(LoadError, match=rf"1 tensor cannot be converted: {QKV} (is|would have)"):
        view_of_folder(STORAGE, folder, wanted={QKV: ((96, 16), wanted)})


def test_parts_of_several_dtypes_need_a_wanted_one(tmp_path):
    tensors = random(GROUPED)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    folder = folder_of(tmp_path / "hf", GROUPED, tensors)
    with pytest.raises(LoadError, match=f"{QKV} would have the dtypes bfloat16 and float32"):
        view_of_folder(STORAGE, folder)
    found = everything(view_of_folder(STORAGE, folder, wanted={QKV: ((96, 16), "float32")}))
    same(found, assemble(rules(GROUPED), {**tensors, name: tensors[name].astype(np.float32)}))


def numbered(folder):
    """Returns the path of a new folder below ``folder``."""
    return folder / str(len(list(folder.iterdir())))


def refuses(words, error, work, *values):
    with pytest.raises(error) as found:
        work(*values)
    assert all(word in str(found.value) for word in words), found.value


# ---- refusals ------------------------------------------------------------------------------------


def test_folders_that_are_refused(tmp_path):
    tensors, name = random(GROUPED), "model.layers.1.mlp.up_proj.weight"

    def refused(found, *words, model=GROUPED):
        folder = folder_of(numbered(tmp_path), model, found)
        refuses(words, LoadError, view_of_folder, STORAGE, folder)

    refused({key: value for key, value in tensors.items() if key != name}, f"missing: {name}")
    refused(
        {**tensors, "model.layers.2.mlp.up_proj.weight": tensors[name]},
        "without a rule: model.layers.2.mlp.up_proj.weight",
    )
    refused(
        {**tensors, "model.layers.0.self_attn.q_proj.bias": tensors[name]},
        "without a rule",
        "q_proj.bias",
    )
    refused(
        {**tensors, name: tensors[name][:-1]},
        f"{name} is (11, 16), not (12, 16)",
        "2 x intermediate_size 12 = 24",
    )
    refused(tensors, "q_proj.weight is (48, 16), not (24, 16)", model=replace(GROUPED, heads=4))
    refused(
        {key: value for key, value in tensors.items() if key != "lm_head.weight"},
        "missing: lm_head.weight",
    )
    assert view_of_folder(
        STORAGE,
        folder_of(
            tmp_path / "more",
            GROUPED,
            {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)},
        ),
    )


def test_tied_weights(tmp_path):
    model = MODELS["tied"]
    tensors = random(model)
    folder = folder_of(tmp_path / "hf", model, tensors)
    found = everything(view_of_folder(STORAGE, folder))
    np.testing.assert_array_equal(found[HEAD], tensors["model.embed_tokens.weight"])
    both = folder_of(
        tmp_path / "both",
        model,
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
    )
    # transformers ties them, whatever is in the file
    same(everything(view_of_folder(STORAGE, both)), found)
    wanted = {name: (rule.shape, "float32") for name, rule in rules(model).items() if name != HEAD}
    assert read_network(STORAGE, folder, wanted, {}, 0, tied=True).keys() == wanted.keys()
    untied = folder_of(tmp_path / "untied", GROUPED, random(GROUPED))
    with pytest.raises(ConfigError, match="lm_head.weight would be lost"):
        read_network(STORAGE, untied, wanted, {}, 0, tied=True)


class Network:
    """Has the fields of mindformers' TransformerConfig that are read."""

    num_layers, hidden_size, num_attention_heads, num_query_groups, kv_channels, num_moe_experts = (
        2,
        16,
        8,
        4,
        6,
        None,
    )
    use_contiguous_weight_layout_attention, use_interleaved_weight_layout_mlp = False, True


def test_network_of_other_dimensions(tmp_path):
    folder = folder_of(tmp_path / "hf", GROUPED, random(GROUPED))
    network = Network()
    check_network(GROUPED, network)
    # linear_qkv has the same shape
    network.num_attention_heads, network.num_query_groups = 6, 5
    with pytest.raises(
        ConfigError, match="num_attention_heads 6 instead of 8, num_query_groups 5 instead of 4"
    ):
        read_network(STORAGE, folder, {}, {}, 0, config=network)
    network = Network()
    network.num_layers = 1
    with pytest.raises(ConfigError, match="num_layers 1 instead of 2"):
        read_network(STORAGE, folder, {}, {}, 0, config=network)


def test_network_with_contiguous_orders(tmp_path):
    model, network = MODELS["contiguous"], Network()
    network.use_contiguous_weight_layout_attention, network.use_interleaved_weight_layout_mlp = (
        True,
        False,
    )
    assert orders_of(network) == (CONTIGUOUS, CONTIGUOUS, False) and orders_of(
        Network()
    ) == orders_of(None)
    tensors = random(model)
    folder = folder_of(tmp_path / "hf", model, tensors)
    one = network_of(model, TensorLayout((1,), (-1, -1)))(0, "float32")
    same(read_network(STORAGE, folder, *one, config=network), assemble(rules(model), tensors))
    with pytest.raises(ConfigError, match="sharded by tensor parallelism"):
        read_network(
            STORAGE,
            folder,
            *network_of(model, TensorLayout((2,), (0, -1)))(0, "float32"),
            config=network,
        )


def test_networks_that_do_not_fit(tmp_path):
    folder = folder_of(tmp_path / "hf", MOE, random(MOE))
    wanted = {name: (rule.shape, "float32") for name, rule in rules(MOE).items()}
    buffers = {"decoder.layers.0.mlp.router.fi_accu": ((4,), "float32")}
    assert read_network(STORAGE, folder, {**wanted, **buffers}, {}, 0).keys() == wanted.keys()
    with pytest.raises(LoadError, match="lora_a is not in the checkpoint"):
        read_network(
            STORAGE, folder, {**wanted, "decoder.layers.0.lora_a": ((4,), "float32")}, {}, 0
        )
    with pytest.raises(
        LoadError, match=r"is \(20, 16\) in the checkpoint, \(24, 16\) in the network"
    ):
        read_network(STORAGE, folder, {**wanted, HEAD: ((24, 16), "float32")}, {}, 0)

    class RenameConvertOp:
        hf_names, mf_names = ["model.norm.weight"], ["decoder.norm.weight"]

    with pytest.raises(LoadError, match="template does not fit"):
        read_network(STORAGE, folder, wanted, {}, 0, converters=[RenameConvertOp()])


def test_hugging_face_folders_are_recognized(tmp_path):
    assert is_huggingface(STORAGE, folder_of(tmp_path / "hf", MOE, random(MOE)))
    other = tmp_path / "other"
    other.mkdir()
    assert not is_huggingface(STORAGE, str(other)) and not is_huggingface(
        STORAGE, str(tmp_path / "none")
    )
    with pytest.raises(ConfigError, match="config.json does not exist"):
        view_of_folder(STORAGE, str(other))
    (other / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert not is_huggingface(STORAGE, str(other))
    (other / "config.json").write_text('["qwen3"]', encoding="utf-8")
    assert not is_huggingface(STORAGE, str(other))
    with pytest.raises(CorruptFileError, match="config.json"):
        read_model(STORAGE, str(other))


# ---- latent attention, next-token prediction -----------------------------------------------------


class LatentNetwork(Network):
    """The same of a network of LATENT."""

    num_layers, num_attention_heads, num_moe_experts, multi_latent_attention, qk_layernorm = (
        3,
        4,
        4,
        True,
        True,
    )
    q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim = LATENT.latent
    moe_router_enable_expert_bias, mtp_num_layers, mla_qkv_concat = True, 1, False


def wanted_of(model):
    return {name: (rule.shape, "float32") for name, rule in rules(model).items()}


def test_latent_network(tmp_path):
    tensors = random(LATENT)
    folder = folder_of(tmp_path / "hf", LATENT, tensors)
    for concatenated in (False, True):
        model, network = replace(LATENT, concatenated=concatenated), LatentNetwork()
        network.mla_qkv_concat = concatenated
        same(
            read_network(
                STORAGE, folder, wanted_of(model), {}, 0, config=network, kind="deepseek_v3"
            ),
            assemble(rules(model), tensors),
        )
    with pytest.raises(
        ConfigError, match="model_type is deepseek_v3, but the network is qwen3_moe"
    ):
        read_network(STORAGE, folder, {}, {}, 0, config=network, kind="qwen3_moe")
    for key, value, message in (
        ("qk_layernorm", False, "qk_layernorm 0 instead of True"),
        ("q_lora_rank", None, "q_lora_rank 0"),
        ("moe_router_enable_expert_bias", False, "enable_expert_bias 0 instead of True"),
        ("qk_head_dim", 128, "qk_head_dim 128 instead of 6"),
        ("mtp_num_layers", 2, "mtp_num_layers 2 instead of 1"),
    ):
        network = LatentNetwork()
        setattr(network, key, value)
        with pytest.raises(ConfigError, match=message):
            read_network(STORAGE, folder, {}, {}, 0, config=network)


def test_network_without_predictions(tmp_path):
    """It takes the other layers, from a folder that has such a layer and from one of transformers,
    which does not save it."""
    tensors, network, model = random(LATENT), LatentNetwork(), replace(LATENT, predictions=0)
    network.mtp_num_layers = 0
    less = {
        name: array for name, array in tensors.items() if not name.startswith("model.layers.3.")
    }
    for name, found in (("with", tensors), ("without", less)):
        folder, notes = folder_of(tmp_path / name, LATENT, found), []
        same(
            read_network(
                STORAGE, folder, wanted_of(model), {}, 0, config=network, emit=notes.append
            ),
            assemble(rules(model), tensors),
        )
        assert len(notes) == 1 and folder in notes[0].text
    with pytest.raises(
        LoadError, match=r"missing: model.layers.3.enorm.weight.* set num_nextn_predict_layers to 0"
    ):
        read_network(STORAGE, folder, wanted_of(LATENT), {}, 0, config=LatentNetwork())
    with pytest.raises(LoadError, match=r"without a rule: model.layers.3.*"):
        viewed(folder_of(tmp_path / "other", model, tensors), model)


def test_copies_in_the_layer_of_predictions(tmp_path):
    """They need not be there, and have the shape of what they repeat."""
    tensors = random(LATENT)
    name = "model.layers.3.shared_head.head.weight"
    less = {key: array for key, array in tensors.items() if key != name}
    same(
        everything(viewed(folder_of(tmp_path / "less", LATENT, less), LATENT)),
        assemble(rules(LATENT), tensors),
    )
    with pytest.raises(
        LoadError,
        match=rf"{name} is \(20, 15\), not \(20, 16\) \(a part of vocab_size 20, by hidden_size 16",
    ):
        viewed(folder_of(tmp_path / "hf", LATENT, {**tensors, name: tensors[name][:, :15]}), LATENT)


def test_exports_of_latent_models(tmp_path):
    """Names tell whether projections are concatenated; the layer of predictions must fit
    config.json; biases stay float32."""
    tensors = random(LATENT)
    for name in ("latent", "concatenated"):
        source = completed(tmp_path / name, assemble(rules(MODELS[name]), tensors))
        back = exported(
            source, tmp_path / f"{name} hf", replace(LATENT, mlp=MODELS[name].mlp), "bfloat16"
        )
        found = everything(open_checkpoint(STORAGE, back).weights)
        biases = {
            key: array for key, array in tensors.items() if key.endswith("e_score_correction_bias")
        }
        same(found, bits(tensors, "bfloat16") | biases)
        assert len(biases) == 3
        written = json.loads((tmp_path / f"{name} hf" / "config.json").read_text(encoding="utf-8"))
        assert written["torch_dtype"] == "bfloat16"
    with pytest.raises(
        LoadError, match=r"without a rule: mtp.layers.0.* num_nextn_predict_layers must be 1"
    ):
        to_huggingface(source, replace(MODELS["concatenated"], predictions=0), "keep", 1 << 30)
    whole_ = assemble(rules(LATENT), tensors)
    source = completed(
        tmp_path / "less",
        {key: array for key, array in whole_.items() if not key.startswith("mtp.")},
    )
    with pytest.raises(LoadError, match=r"missing: mtp.layers.0.enorm.weight"):
        to_huggingface(source, LATENT, "keep", 1 << 30)


# ---- round trips ---------------------------------------------------------------------------------


def convert(conversion):
    conversion.run(Engine())
    return conversion.target


def exported(source, folder, model, dtype="keep", part=5 << 30):
    job = to_huggingface(source, model, dtype, part, document(model))
    return convert(Conversion(STORAGE, job, str(folder)))


def test_sources_that_do_not_fit(tmp_path):
    whole_ = assemble(rules(GROUPED), random(GROUPED))

    def refused(tensors, model, *words):
        source = completed(numbered(tmp_path), tensors)
        refuses(words, LoadError, to_huggingface, source, model, "keep", 1 << 30)

    refused(
        whole_,
        replace(GROUPED, groups=2),
        f"{QKV} is (96, 16), expected (72, 16): num_attention_heads 8 x head_dim 6 + "
        "num_key_value_heads 2 x head_dim 6 + ",
    )
    refused(
        whole_,
        replace(GROUPED, layers=3),
        "missing: decoder.layers.2.input_layernorm.weight",
        "and 3 more",
    )
    refused(whole_, replace(GROUPED, layers=1), "without a rule: decoder.layers.1.")
    refused(whole_, MODELS["tied"], f"without a rule: {HEAD}", "tie_word_embeddings must be false")
    refused(
        {name: array for name, array in whole_.items() if name != HEAD},
        GROUPED,
        f"missing: {HEAD}",
        "tie_word_embeddings must be true",
    )
    refused(
        {**whole_, "decoder.layers.0.self_attention.linear_qkv.bias": np.zeros(96, np.float32)},
        GROUPED,
        "linear_qkv.bias",
    )
    refused(
        {**whole_, "decoder.layers.0.mlp.router.expert_bias": np.zeros(4, np.float32)},
        GROUPED,
        "router.expert_bias",
    )
    source = completed(tmp_path / "double", {**whole_, PROJ: whole_[PROJ].astype(np.float64)})
    with pytest.raises(LoadError, match="o_proj.weight is float64, expected bfloat16"):
        to_huggingface(source, GROUPED, "bfloat16", 1 << 30)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        to_huggingface(source, GROUPED, "int8", 1 << 30)
    states = {
        f"{prefix}.{name}": array
        for name, array in whole_.items()
        for prefix in ("adam_m", "adam_v", "accu_grads")
    }
    source = completed(
        tmp_path / "states",
        {
            **whole_,
            **states,
            "global_step": np.zeros(1, np.int32),
            "decoder.layers.0.mlp.router.fi_accu": np.zeros(4, np.float32),
        },
    )
    job = to_huggingface(source, GROUPED, "keep", 1 << 30)
    assert job.files[0].holds.keys() == inverse_rules(rules(GROUPED)).keys() and job.documents == ()


def test_recorded_checksums_are_compared(tmp_path):
    """Checksums of tensors that keep their bytes are compared during the copy, those of other
    tensors before it."""
    from rank_folders import flip_bit

    for name in (QKV, PROJ):
        folder = tmp_path / name
        folder.mkdir()
        source = completed(folder / "source", assemble(rules(GROUPED), random(GROUPED)))
        merged = convert(
            Conversion(STORAGE, to_consolidated(source, MINDSPORE), str(folder / "merged"))
        )
        source = open_checkpoint(STORAGE, merged)
        job = to_huggingface(source, GROUPED, "keep", 1 << 30)
        traffic, tensors = Traffic(), source.weights.tensors
        check_source(job.source.weights, traffic)
        fused = [one for one in tensors if "linear_qkv" in one or "linear_fc1" in one]
        assert traffic.verified == traffic.read == sum(tensors[one].nbytes for one in fused)
        path = os.path.join(merged, "part0.safetensors")
        at = source.weights.headers[path].tensors[name].ranges[0][0]
        os.chmod(path, 0o644)
        flip_bit(Path(path), at + 5)
        with pytest.raises(CorruptFileError, match=name):
            check_source(job.source.weights, Traffic())
            exported(source, folder / "hf", GROUPED)
        assert not os.path.exists(folder / "hf")

"""fp8 weights with block scales: the formula, whatever part is read, and scales that do not fit."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from huggingface_folders import GROUPED, LATENT, MOE, assemble, folder_of, random
from hypothesis import given
from hypothesis import strategies as st
from reshard.test_huggingface import (
    STORAGE,
    bits,
    everything,
    network_of,
    numbered,
    read_network,
    refuses,
    same,
    viewed,
)

from mindresume.errors import LoadError
from mindresume.formats.huggingface import copies, rules
from mindresume.model.layout import TensorLayout, held
from mindresume.reshard.range_reader import scale_blocks, view
from mindresume.reshard.translated_view import FP8, SCALE, scales_shape


def quantised(matrix, block, dtype=np.float32):
    """(fp8 values, scales) as DeepSeek makes them: the largest of each block becomes the largest of
    fp8."""
    rows, columns = scales_shape(matrix.shape, block)
    values, scales = (
        np.empty(matrix.shape, ml_dtypes.float8_e4m3fn),
        np.empty((rows, columns), np.float32),
    )
    for i in range(rows):
        for j in range(columns):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(matrix[part]).max() / 448 or 1
            values[part] = (matrix[part] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return values, scales.astype(dtype)


def expanded(values, scales, block):
    """The formula, element by element: float32(value) * scale."""
    whole = np.repeat(np.repeat(scales.astype(np.float32), block[0], 0), block[1], 1)
    return values.astype(np.float32) * whole[: values.shape[0], : values.shape[1]]


def quantised_folder(folder, model, dtype=np.float32):
    """A folder with matrices in fp8 but for embeddings, norms and routers. Returns (folder, its
    values in float32)."""
    tensors, stored = random(model), {}
    for name, array in tensors.items():
        if "proj" in name and "eh_proj" not in name:
            stored[name], stored[name + SCALE] = quantised(array, model.block, dtype)
            tensors[name] = expanded(stored[name], stored[name + SCALE], model.block)
        else:
            stored[name] = array.astype(ml_dtypes.bfloat16)
            tensors[name] = stored[name].astype(np.float32)
    return folder_of(folder, model, stored), tensors


@given(st.data())
def test_any_part_of_a_matrix_is_the_formula(data):
    block = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    shape = data.draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = generator.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = generator.random(scales_shape(shape, block), np.float32)
    part = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        part.append(
            range(
                start,
                data.draw(st.integers(start + 1, size)),
                data.draw(st.integers(1, 3)) if not part else 1,
            )
        )
    rows, columns = part
    near = scales[
        rows[0] // block[0] : rows[-1] // block[0] + 1,
        columns[0] // block[1] : columns[-1] // block[1] + 1,
    ]
    found = scale_blocks(values[np.ix_(rows, columns)], near, rows, columns, block)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expanded(values, scales, block)[np.ix_(rows, columns)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    [
        replace(GROUPED, block=(5, 7)),
        replace(MOE, block=(4, 4)),
        replace(LATENT, block=(5, 3)),
        replace(LATENT, block=(128, 128), concatenated=True),
    ],
)
def test_folders(tmp_path, model, dtype):
    """The values of the formula, rounded once if bfloat16 is wanted; copies of fp8 are none of the
    network's."""
    folder, tensors = quantised_folder(tmp_path / "hf", model)
    known = rules(model)
    wanted = {name: (rule.shape, dtype) for name, rule in known.items()}
    same(everything(viewed(folder, model, wanted=wanted)), bits(assemble(known, tensors), dtype))
    unasked = everything(viewed(folder, model))
    same(unasked, bits(assemble(known, tensors), "bfloat16"))


def test_scales_in_bfloat16(tmp_path):
    """As Qwen3-FP8 has them."""
    model = replace(GROUPED, block=(5, 7))
    folder, tensors = quantised_folder(tmp_path / "hf", model, ml_dtypes.bfloat16)
    wanted = {name: (rule.shape, "float32") for name, rule in rules(model).items()}
    same(everything(viewed(folder, model, wanted=wanted)), assemble(rules(model), tensors))


@pytest.mark.parametrize(
    "layout",
    [TensorLayout((2,), (0, -1)), TensorLayout((2,), (-1, 0)), TensorLayout((4,), (-1, -1), 2)],
)
def test_each_rank_reads_its_slices(tmp_path, layout):
    model = replace(MOE, block=(5, 7))
    folder, tensors = quantised_folder(tmp_path / "hf", model)
    whole = assemble(rules(model), tensors)
    for rank in range(layout.stage_size):
        found = read_network(STORAGE, folder, *network_of(model, layout)(rank, "float32"))
        same(
            found,
            {
                name: view(array, held(layout, rank, array.shape)) if array.ndim == 2 else array
                for name, array in whole.items()
            },
        )


def test_scales_that_do_not_fit(tmp_path):
    model = replace(LATENT, block=(5, 7))
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    tensors = random(model)
    tensors = {
        key: tensors[key].astype(ml_dtypes.bfloat16) for key in tensors if key not in copies(model)
    }
    tensors[name], scales = quantised(tensors[name].astype(np.float32), model.block)

    def refused(more, *words, block=model.block):
        folder = numbered(tmp_path)
        folder = folder_of(folder, replace(model, block=block), {**tensors, **more})
        refuses(words, LoadError, viewed, folder, model)

    good = {name + SCALE: scales}
    viewed(folder_of(tmp_path / "good", model, {**tensors, **good}), model)
    refused({}, f"{name} is {FP8}", f"{name}{SCALE} are missing")
    refused(good, f"{name} is {FP8}", "config.json has no quantization_config", block=None)
    refused(
        good,
        f"{name}{SCALE} is (4, 2), expected (1, 1)",
        "(16, 10) in blocks of weight_block_size [128, 128]",
        block=(128, 128),
    )
    refused({name + SCALE: scales[:, :1]}, f"{name}{SCALE} is (4, 1), expected (4, 2)")
    refused(
        {name + SCALE: scales.astype(np.float64)},
        f"{name}{SCALE} is float64, expected float32 or bfloat16",
    )
    other = "model.layers.0.mlp.up_proj.weight"
    refused({**good, other + SCALE: scales}, f"{other}{SCALE} is a scale, but {other} is not {FP8}")
    refused(
        {
            **good,
            "model.norm.weight": tensors["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn),
            "model.norm.weight" + SCALE: scales,
        },
        "model.norm.weight_scale_inv is (4, 2), expected a matrix",
    )


def test_other_dtypes_than_those_of_the_formula_are_refused(tmp_path):
    model = replace(GROUPED, block=(5, 7))
    folder, _ = quantised_folder(tmp_path / "hf", model)
    with pytest.raises(LoadError, match=f"linear_fc2.weight is {FP8}, expected float16"):
        viewed(
            folder, model, wanted={"decoder.layers.1.mlp.linear_fc2.weight": ((16, 12), "float16")}
        )


def test_exports_name_no_quantisation(tmp_path):
    """The config.json of an fp8 folder serves an export, whose weights are not quantised."""
    from huggingface_folders import document
    from reshard.test_huggingface import completed, exported

    model = replace(GROUPED, block=(5, 7))
    assert "quantization_config" in document(model)
    source = completed(tmp_path / "source", assemble(rules(model), random(model)))
    back = exported(source, tmp_path / "hf", model, "bfloat16")
    written = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in written and written["torch_dtype"] == "bfloat16"
    assert viewed(back, GROUPED).tensors

"""Operators of a PyNative language model that have no CPU kernel, replaced by equal arithmetic.

| missing on CPU | here |
|---|---|
| mint: arange, zeros_like, ones_like, full | numpy, then a Tensor |
| mint: outer, stack, index_select, scatter_add, tril, equal, addcmul, clone; Tensor.clone | primitives that the CPU has |
| mint embedding | Gather |
| mint dropout | a factor of 0 or 1 / (1 - p), drawn from seed and offset of the default generator, as a device does |
| rms_norm, swiglu | mean of squares, Rsqrt; Split, silu |
| flash_attention_score, FlashAttentionScore | BatchMatMul, Softmax, BatchMatMul |
| the "meta" device, in-place zero_, fill_, normal_ (>= 2.0) | the model is built on the CPU at once; copy_ of a numpy array |

The trainer's arithmetic is thereby the same in two runs on the same machine, which is all that the
tests compare; it is not the arithmetic of a device. Exchanged are names of ``mindspore`` before
``import mindformers``, whose modules bind them.
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.common.generator import default_generator
from mindspore.ops import operations as P
from mindspore.ops.operations import nn_ops

from .. import capabilities

_LOW = -1e9  # added to a score that is masked out
_ANY = 2147483647
_OFFSETS = Tensor(12, ms.int64)  # by which MindSpore's dropout moves its generator


def _numpy(dtype: ms.Type) -> type:
    return ms.dtype_to_nptype(dtype)


# ---- mint ----------------------------------------------------------------------------------------


def arange(start=0, end=None, step=1, *, dtype=None):
    values = np.arange(*((0, start) if end is None else (start, end)), step)
    return Tensor(values if dtype is None else values.astype(_numpy(dtype)))


def zeros_like(x, *, dtype=None, **_):
    return Tensor(np.zeros(x.shape, _numpy(dtype or x.dtype)))


def ones_like(x, *, dtype=None, **_):
    return Tensor(np.ones(x.shape, _numpy(dtype or x.dtype)))


def full(size, fill_value, *, dtype=None):
    return Tensor(
        np.full(
            size,
            fill_value,
            _numpy(dtype or (ms.float32 if isinstance(fill_value, float) else ms.int64)),
        )
    )


def outer(a, b):
    return P.Mul()(P.Reshape()(a, (-1, 1)), P.Reshape()(b, (1, -1)))


def stack(tensors, dim=0):
    return P.Stack(dim)(tensors)


def index_select(x, dim, index):
    return P.Gather()(x, index, dim)


def scatter_add(x, dim, index, src):
    return P.TensorScatterElements(dim, "add")(x, index, src)


def tril(x, diagonal=0):
    return x * Tensor(np.tril(np.ones(x.shape[-2:]), diagonal).astype(_numpy(x.dtype)))


def equal(a, b):
    return P.Equal()(a, b)


def addcmul(input, tensor1, tensor2, *, value=1):
    return input + tensor1 * tensor2 * value


def clone(x):
    return x.copy()


def embedding(
    input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False
):
    return P.Gather()(weight, input, 0)


def dropout(x, p=0.5, training=True, inplace=False):
    if not (training and p):
        return x
    seed, offset = default_generator._step(_OFFSETS)
    drawn = np.random.default_rng([int(seed.asnumpy()), int(offset.asnumpy())]).random(x.shape)
    return x * Tensor(np.where(drawn < p, 0, 1 / (1 - p)).astype(np.float32)).astype(x.dtype)


# ---- ops -----------------------------------------------------------------------------------------


def rms_norm(x, gamma, epsilon=1e-6):
    """Returns the norm and 1 / root mean square, computed in float32."""
    single = P.Cast()(x, ms.float32)
    factor = P.Rsqrt()(P.ReduceMean(True)(single * single, -1) + epsilon)
    return P.Cast()(single * factor * P.Cast()(gamma, ms.float32), x.dtype), factor


def swiglu(x, dim=-1):
    gate, value = P.Split(dim, 2)(x)
    return ops.silu(gate) * value


def _heads_first(x: Tensor, heads: int, layout: str) -> Tensor:
    """Returns [batch, heads, sequence, width]."""
    if layout == "BNSD":
        return x
    order = {"SBH": (1, 2, 0, 3), "BSH": (0, 2, 1, 3)}[layout]
    return P.Transpose()(P.Reshape()(x, (*x.shape[:2], heads, -1)), order)


def flash_attention_score(
    query,
    key,
    value,
    head_num,
    real_shift=None,
    drop_mask=None,
    padding_mask=None,
    attn_mask=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    keep_prob=1.0,
    scalar_value=1.0,
    pre_tokens=_ANY,
    next_tokens=_ANY,
    inner_precise=0,
    input_layout="BSH",
    sparse_mode=0,
    **_,
):
    """Layouts SBH, BSH and BNSD. ``attn_mask``: 1 where a score does not count; if it has not the
    shape of the scores (a compressed mask), attention is causal. Without dropout, shifts and
    prefixes. Key and value heads are repeated as often as needed."""
    width = query.shape[-1] if input_layout == "BNSD" else query.shape[-1] // head_num
    q, k, v = (
        P.Cast()(_heads_first(x, heads, input_layout), ms.float32)
        for x, heads in (
            (query, head_num),
            (key, key.shape[-1] // width),
            (value, key.shape[-1] // width),
        )
    )
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (
            P.Reshape()(
                P.Tile()(P.ExpandDims()(x, 2), (1, 1, repeats, 1, 1)),
                (x.shape[0], q.shape[1], *x.shape[2:]),
            )
            for x in (k, v)
        )
    scores = P.BatchMatMul(transpose_b=True)(q, k) * scalar_value
    if attn_mask is not None and attn_mask.shape[-1] == scores.shape[-1]:
        mask = P.Cast()(attn_mask, ms.float32)
    else:
        mask = Tensor(np.triu(np.ones(scores.shape[-2:], np.float32), 1))
    out = P.Cast()(P.BatchMatMul()(P.Softmax(-1)(scores + mask * _LOW), v), query.dtype)
    if input_layout == "BNSD":
        return out
    out = P.Transpose()(out, (2, 0, 1, 3) if input_layout == "SBH" else (0, 2, 1, 3))
    return P.Reshape()(out, (*out.shape[:2], -1))


class FlashAttentionScore:
    """The primitive as mindformers 2.x calls it. Returns (None, None, None, attention): the first
    three are for a fused gradient."""

    def __init__(
        self,
        head_num,
        keep_prob=1.0,
        scale_value=1.0,
        pre_tokens=_ANY,
        next_tokens=_ANY,
        inner_precise=0,
        input_layout="BSH",
        sparse_mode=0,
    ):
        self.options = {
            "head_num": head_num,
            "scalar_value": scale_value,
            "input_layout": input_layout,
        }

    def __call__(
        self,
        query,
        key,
        value,
        real_shift=None,
        drop_mask=None,
        padding_mask=None,
        attn_mask=None,
        prefix=None,
        actual_seq_qlen=None,
        actual_seq_kvlen=None,
    ):
        return (
            None,
            None,
            None,
            flash_attention_score(query, key, value, attn_mask=attn_mask, **self.options),
        )


# ---- building the model --------------------------------------------------------------------------


def _build_on_cpu_at_once() -> None:
    """mindformers >= 2.0 builds the model on the device "meta", then calls ``to_empty``, then fills
    each parameter in place. The CPU backend leaves the parameters on "meta", so that device is left
    out."""
    context = ms.DeviceCtx
    ms.DeviceCtx = lambda name, device_id=None: (
        contextlib.nullcontext() if name == "meta" else context(name, device_id)
    )
    nn.Cell.to_empty = lambda self, *, device=None, recurse=True: self

    def put(tensor: Tensor, values: np.ndarray) -> Tensor:
        tensor.copy_(Tensor(values.astype(_numpy(tensor.dtype))))
        return tensor

    Tensor.zero_ = lambda self: put(self, np.zeros(self.shape))
    Tensor.fill_ = lambda self, value: put(self, np.full(self.shape, value))
    Tensor.normal_ = lambda self, mean=0, std=1, *, generator=None: put(
        self, np.random.normal(mean, std, self.shape)
    )


def _replace(module: object, functions: Sequence[object]) -> None:
    for function in functions:
        setattr(module, function.__name__, function)


def install() -> None:
    """Before ``import mindformers``."""
    _replace(
        mint,
        (
            arange,
            zeros_like,
            ones_like,
            full,
            outer,
            stack,
            index_select,
            scatter_add,
            tril,
            equal,
            addcmul,
            clone,
        ),
    )
    _replace(mint.nn.functional, (embedding, dropout))
    _replace(ops, (rms_norm, swiglu, flash_attention_score))
    _replace(nn_ops, (FlashAttentionScore,))
    Tensor.clone = clone
    if capabilities.builds_models_on_meta():
        _build_on_cpu_at_once()

"""Operators on the way of a mindformers language model that have no CPU kernel, replaced by equal
arithmetic.

What: each operator below is exchanged for one that computes the same from operators the CPU has.
Why: without them the model compiles, and then no kernel is found. All keep their ``shard``
strategies, so layouts and strategy files are those of a device.

| missing on CPU | replaced by |
|---|---|
| RmsNorm (FusedRMSNorm) | mindformers' own unfused RMSNorm |
| Outer (rotary embedding) | Reshape + Mul |
| FlashAttentionScore | ``CpuCoreAttention``: BatchMatMul, Softmax, BatchMatMul |
| EmbeddingDenseBackward (mint embedding) | Gather |
| NPUGetFloatStatusV2, FloatStatus, AllFinite | no overflow check: always "no overflow" |
| DropoutExt | a factor of 0 or 1 / (1 - p), drawn from its seed and offset, which mindformers' graph gives as constants |
| AllReduce(max) in the vocabulary-parallel softmax | the max is left out: logits of a tiny model are small |
| SplitWithSize (MindSpore < 2.8, that is mindformers 1.8.0) | Slice |

Since the overflow check is gone, the loss scale never changes: overflow cannot be tested on this
cluster.
"""  # noqa: E501

import math
import sys

import mindspore.common.dtype as mstype
import numpy as np
from mindspore import ParallelMode, Tensor, mint, nn
from mindspore.ops import functional as F
from mindspore.ops import operations as P
from mindspore.ops.primitive import constexpr
from mindspore.parallel._utils import _get_parallel_mode

from . import capabilities


class Outer(nn.Cell):
    """Outer product of two vectors: (n), (m) -> (n, m)."""

    def __init__(self):
        super().__init__()
        self.reshape = P.Reshape()
        self.mul = P.Mul()

    def construct(self, a, b):
        return self.mul(self.reshape(a, (-1, 1)), self.reshape(b, (1, -1)))

    def shard(self, in_strategy=None, out_strategy=None, **_):
        if in_strategy:
            self.mul.shard(((in_strategy[0][0], 1), (1, in_strategy[1][0])))
        return self


class SplitWithSize(nn.Cell):
    """Split along ``dim`` into pieces of the given sizes."""

    def __init__(self):
        super().__init__()
        self.slice = P.Slice()
        self.shape = P.Shape()

    def construct(self, x, sizes, dim=0):
        shape = self.shape(x)
        axis = dim if dim >= 0 else dim + len(shape)
        pieces = ()
        start = 0
        for size in sizes:
            begin, extent = (), ()
            for i in range(len(shape)):
                begin += (start,) if i == axis else (0,)
                extent += (size,) if i == axis else (shape[i],)
            pieces += (self.slice(x, begin, extent),)
            start += size
        return pieces

    def shard(self, in_strategy=None, out_strategy=None, **_):
        if in_strategy:
            strategy = in_strategy[0]
            if not isinstance(strategy, tuple):
                from mindformers.parallel_core.training_graph.device_matrix import layout

                strategy = layout.to_tuple_strategy(strategy)
            self.slice.shard((tuple(strategy),))
        return self

    def add_prim_attr(self, *_):
        return self


class CpuCoreAttention(nn.Cell):
    """Stands in for mindformers' FlashAttention, with its constructor.

    query, key, value: [S, B, N, D]; result: [S, B, N * D]. Needs ``use_flash_attention: False`` and
    as many key/value heads as heads (mindformers' own ``_repeat_kv`` does not fit [S, B, N, D], so
    no grouped-query attention).
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type=None,
        attention_type=None,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
    ):
        super().__init__()
        head_dim = (
            (config.qk_head_dim + config.qk_pos_emb_head_dim)
            if config.multi_latent_attention
            else config.kv_channels
        )
        self.scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.tq, self.tk, self.tv, self.to = (P.Transpose() for _ in range(4))
        self.qk = P.BatchMatMul(transpose_b=True)
        self.pv = P.BatchMatMul()
        self.mul, self.mmul, self.add, self.softmax = P.Mul(), P.Mul(), P.Add(), P.Softmax(-1)
        self.cast, self.reshape, self.shape = P.Cast(), P.Reshape(), P.Shape()
        if _get_parallel_mode() == ParallelMode.SEMI_AUTO_PARALLEL:
            dp, tp = config.data_parallel_size or 1, config.tensor_model_parallel_size or 1
            for transpose in (self.tq, self.tk, self.tv):
                transpose.shard(((1, dp, tp, 1),))
            self.qk.shard(((dp, tp, 1, 1), (dp, tp, 1, 1)))
            self.pv.shard(((dp, tp, 1, 1), (dp, tp, 1, 1)))
            self.mul.shard(((dp, tp, 1, 1), ()))
            self.mmul.shard(((dp, 1, 1, 1), ()))
            self.add.shard(((dp, tp, 1, 1), (dp, 1, 1, 1)))
            self.softmax.shard(((dp, tp, 1, 1),))
            self.to.shard(((dp, tp, 1, 1),))

    def construct(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        alibi_mask=None,
        prefix=None,
        padding_mask=None,
        actual_seq_qlen=None,
        actual_seq_kvlen=None,
    ):
        q = self.tq(query, (1, 2, 0, 3))
        k = self.tk(key, (1, 2, 0, 3))
        v = self.tv(value, (1, 2, 0, 3))
        s = self.mul(self.qk(q, k), self.scale)
        if attention_mask is not None:
            s = self.add(s, self.mmul(self.cast(attention_mask, s.dtype), -10000.0))
        p = self.softmax(self.cast(s, mstype.float32))
        o = self.pv(self.cast(p, v.dtype), v)
        o = self.to(o, (2, 0, 1, 3))  # [S, B, N, D]
        sq, b, n, d = self.shape(o)
        return self.reshape(o, (sq, b, n * d))


def _embedding(
    ids, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False
):
    return P.Gather()(weight, ids, 0)


def _get_overflow_status(self, status, compute_output):
    return F.depend(Tensor(False), status)


def _start_overflow_check(self, pre_cond, compute_input):
    return 0, compute_input


def _log_softmax_mcore(self, logits, label):
    logits = self.cast(logits, mstype.float32)
    exp_sum = self.sum(self.exp(logits), -1, True)
    log_softmax_result = self.sub(logits, self.log(exp_sum))
    one_hot_label = self.onehot(label, F.shape(logits)[-1], self.on_value, self.off_value)
    return log_softmax_result, one_hot_label


def _log_softmax_legacy(self, logits, label):
    logits = F.cast(logits, mstype.float32)
    exp_sum = self.sum(self.exp(logits), -1)
    log_softmax_result = self.sub(logits, self.log(exp_sum))
    one_hot_label = self.onehot(label, F.shape(logits)[-1], self.on_value, self.off_value)
    return log_softmax_result, one_hot_label


@constexpr
def _kept(shape, p, seed, offset):
    drawn = np.random.default_rng([seed, offset]).random(shape)
    return Tensor(np.where(drawn < p, 0, 1 / (1 - p)).astype(np.float32))


def _dropout(self, x):
    if not self.training or not self.use_dropout:
        return x
    return x * F.cast(_kept(F.shape(x), self.p, *self.drawn_from), F.dtype(x))


def _with_numbers(init):
    def build(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.drawn_from = (int(self.seed.asnumpy()), int(self.offset.asnumpy()))

    return build


def install() -> None:
    """Call after ``import mindformers`` and before a model is built."""
    import mindformers.core.loss.loss as legacy_loss
    import mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding as rope  # noqa: E501
    import mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs as gpt_specs
    import mindformers.parallel_core.training_graph.loss_func as mcore_loss
    import mindformers.parallel_core.training_graph.transformer.dropout as dropout
    import mindformers.parallel_core.training_graph.transformer.norm as norm
    from mindspore.nn.wrap.loss_scale import TrainOneStepWithLossScaleCell

    dropout.Dropout.__init__, dropout.Dropout.construct = (
        _with_numbers(dropout.Dropout.__init__),
        _dropout,
    )
    norm.FusedRMSNorm = norm.RMSNorm  # FusedNorm.__new__ looks the name up when called
    rope.Outer = Outer
    gpt_specs.FlashAttention = CpuCoreAttention
    mint.nn.functional.embedding = _embedding
    # MindSpore takes every target but GPU and Ascend 910B for Ascend 910A and would emit
    # NPUGetFloatStatusV2.
    TrainOneStepWithLossScaleCell.get_overflow_status = _get_overflow_status
    TrainOneStepWithLossScaleCell.start_overflow_check = _start_overflow_check
    mcore_loss._LogSoftmax.construct = _log_softmax_mcore
    legacy_loss._LogSoftmax.construct = _log_softmax_legacy
    if not capabilities.has_split_with_size():
        import mindspore.ops.auto_generate as auto_generate

        replace_in_mindformers("SplitWithSize", auto_generate.SplitWithSize, SplitWithSize)
        auto_generate.SplitWithSize = SplitWithSize


def replace_in_mindformers(name: str, old: object, new: object) -> None:
    """Puts ``new`` in every loaded module of mindformers that holds ``old`` under ``name``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("mindformers") and getattr(module, name, None) is old:
            setattr(module, name, new)

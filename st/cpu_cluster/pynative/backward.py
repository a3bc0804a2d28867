"""``Tensor.backward`` and its companions over MindSpore's own functional autograd.

What: ``enable`` adds to ``mindspore.Tensor`` the members that the PyNative trainer of mindformers
>= 2.0 uses, in the meaning that torch gives them. MindSpore has everything below: each tensor
carries ``_grad``, ``_requires_grad``, ``_is_leaf`` and ``_retains_grad``, and
``_c_expression.run_backward`` walks the recorded operators. Why: hyper_parallel does this in
``platform.mindspore.autograd_compat.enable_mindspore_backward_compat``, and it is not installed.

``Cell`` records operators only while ``_pynative_executor``'s gradient flag is set, which
``mindspore.grad`` does around its function; here the flag stays set, until ``mindspore.grad`` is
used. Gradients of leaves accumulate. ``retain_grad`` of another tensor is there, but its backward
fails on the CPU, which has no kernel Clone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import capabilities


def enable() -> None:
    """Adds the members; the second call only sets the flag again."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore._c_expression import run_backward

    capabilities.executors()._pynative_executor.set_grad_flag(True)
    if hasattr(Tensor, "backward"):
        return

    def backward(
        self: ms.Tensor,
        gradient: ms.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: ms.Tensor | Sequence[ms.Tensor] | None = None,
    ) -> None:
        """Adds the gradient of this tensor, times ``gradient`` (default 1), to ``grad`` of the
        leaves, or of ``inputs``."""
        gradient = ops.ones_like(self) if gradient is None else gradient
        wanted = (
            () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        )
        run_backward(
            (self,),
            (gradient,),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            wanted,
            allow_unreachable=True,
            accumulate_grad=True,
        )

    def member(name: str) -> property:
        return property(
            lambda self: getattr(self, name), lambda self, value: setattr(self, name, value)
        )

    Tensor.backward = backward
    Tensor.grad = member("_grad")
    Tensor.is_leaf = property(lambda self: self._is_leaf)
    Tensor.retains_grad = property(lambda self: self._retains_grad)
    Tensor.retain_grad = lambda self: self._retain_grad()
    # Parameter has one of its own
    if not hasattr(Tensor, "requires_grad"):
        Tensor.requires_grad = member("_requires_grad")
    if not hasattr(Tensor, "detach"):
        Tensor.detach = lambda self: ops.stop_gradient(self)

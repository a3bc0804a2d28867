"""``mindspore.Model`` on CPU: ``Model.build``, and an emulation of the sink loop.

What and why:

* ``Model.build`` (compile before loading; mindformers calls it when a distributed run loads a
  checkpoint) refuses every target but Ascend. Here: compile with the first batch, not sunk.
  mindformers' ``compile_model`` also requires ``sink_mode: True`` because the build of a device
  needs it; this one does not, so it is allowed with ``sink_mode:
  False``.
* With ``dataset_sink_mode=True`` the CPU backend silently runs its normal loop although ``epoch``
  then counts sinks:
  with sink_size 1 it would train ``epoch`` whole epochs. Here the loop of a device is emulated: one
  "epoch" is sink_size steps, the callbacks come once a sink in the same order, with the same
  ``cb_params``, and see the last step's loss. The batches are fed one by one; there is no device
  queue.
* The callbacks of ``recorder`` are appended to those of the program. In a sink they also get the
  steps within.
"""

import functools
import math
from collections.abc import Iterator

import mindspore as ms

from . import kernels, recorder

_original = {}


def _build(self, train_dataset=None, valid_dataset=None, sink_size=-1, epoch=1, sink_mode=True):
    self._train_network.set_train(True)
    if self._parameter_broadcast:
        self._train_network.set_broadcast_flag()
    helper, net = self._exec_preprocess(
        is_train=True, dataset=train_dataset, dataset_sink_mode=False, epoch_num=epoch
    )
    net.compile(*next(iter(helper)))
    self._train_network.parameter_layout_dict = net.parameter_layout_dict
    train_dataset.reset()


def _train(
    self,
    epoch,
    train_dataset,
    callbacks=None,
    dataset_sink_mode=True,
    sink_size=-1,
    *args,
    **kwargs,
):
    """The original, with the recorders behind the other callbacks; all that is installed on a real
    device."""
    self._cpu_sink = (dataset_sink_mode, sink_size)
    self._cpu_recorders = recorder.from_environment()
    if self._cpu_recorders:
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        callbacks = given + self._cpu_recorders
    return _original["_train"](
        self, epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, *args, **kwargs
    )


def _endless(helper, dataset) -> Iterator:
    """Yields the batches of one epoch after the other. ``helper`` ends at the end of an epoch and
    continues with the next."""
    while True:
        yield from helper
        dataset.reset()


def _train_process(
    self,
    epoch,
    train_dataset,
    list_callback=None,
    cb_params=None,
    initial_epoch=0,
    valid_infos=None,
):
    sink, sink_size = getattr(self, "_cpu_sink", (False, -1))
    if not sink:
        return _original["_train_process"](
            self, epoch, train_dataset, list_callback, cb_params, initial_epoch, valid_infos
        )
    from mindspore.train.model import RunContext, _transfer_tensor_to_tuple

    data_size = train_dataset.get_dataset_size()
    steps_per_sink = data_size if sink_size == -1 else sink_size
    data_epochs = epoch if sink_size == -1 else math.ceil(epoch * sink_size / data_size)
    helper, _ = self._exec_preprocess(
        is_train=True, dataset=train_dataset, dataset_sink_mode=False, epoch_num=data_epochs + 1
    )
    batches = _endless(helper, train_dataset)
    cb_params.sink_size = sink_size
    cb_params.dataset_sink_mode = True
    run_context = RunContext(cb_params)
    list_callback.on_train_begin(run_context)
    for i in range(initial_epoch, epoch):
        cb_params.cur_epoch_num = self._current_epoch_num = i + 1
        list_callback.on_train_epoch_begin(run_context)
        first_step = cb_params.cur_step_num + 1
        cb_params.cur_step_num += steps_per_sink
        self._current_step_num = int((cb_params.cur_step_num - 1) % cb_params.batch_num + 1)
        list_callback.on_train_step_begin(run_context)
        for step in range(first_step, cb_params.cur_step_num + 1):
            batch = _transfer_tensor_to_tuple(next(batches))
            self._check_network_mode(self._train_network, True)
            outputs = self._train_network(*batch)
            if step < cb_params.cur_step_num:
                for callback in self._cpu_recorders:
                    callback.step_in_sink(cb_params, outputs, batch, step)
        cb_params.net_outputs, cb_params.train_dataset_element = outputs, batch
        list_callback.on_train_step_end(run_context)
        list_callback.on_train_epoch_end(run_context)
        if run_context.get_stop_requested():
            break
    list_callback.on_train_end(run_context)
    return None


def install_recorders() -> None:
    """Before ``import mindformers``; idempotent. Works on every device; what a sink does inside is
    not seen there."""
    if not _original:
        _original.update(_train=ms.Model._train, _train_process=ms.Model._train_process)
        ms.Model._train = _train


def install() -> None:
    """Before ``import mindformers``; idempotent."""
    install_recorders()
    ms.Model.build = _build
    ms.Model._train_process = _train_process


def install_in_mindformers() -> None:
    """After ``import mindformers``: lets ``compile_model`` accept ``sink_mode: False``."""
    import mindformers.checkpoint.utils as checkpoint_utils

    compile_model = checkpoint_utils.compile_model

    @functools.wraps(compile_model)
    def compile_model_in_any_sink_mode(model, dataset, mode, sink_mode, *args, **kwargs):
        return compile_model(model, dataset, mode, True, *args, **kwargs)

    kernels.replace_in_mindformers("compile_model", compile_model, compile_model_in_any_sink_mode)

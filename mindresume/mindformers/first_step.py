"""Defines ``FirstStep``, which begins the first step after a load: when the network is compiled and about to compute.

``patches`` puts it behind all other callbacks of a training of the graph trainer, so that none of them changes anything after the
comparison of the parameters, and so that a training without a CheckpointMonitor is compared, too. In the PyNative trainer
``pynative.wrappers`` does the same after the callbacks of a step.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspore.train import Callback

from mindresume.coordination.rank_heartbeat import FIRST_STEP
from mindresume.events import NetworkCompiled
from mindresume.mindformers import adapter, heartbeat, training_context


class FirstStep(Callback):
    """Compares the parameters with what was loaded, and begins the load attempt, once after each load. Raises
    AlteredWeightsError as ``Resources.check_loaded``."""

    def on_train_step_begin(self, run_context: Any) -> None:
        resources, cb_params = training_context.current().resources, run_context.original_args()
        attempt = resources.pending_load.attempt
        if resources.loaded is not None or attempt is not None and not attempt.begun:
            network, callbacks = cb_params.train_network, cb_params.list_callback or ()
            adapter.call_when_compiled(network, lambda: self._begin(network, callbacks))

    @staticmethod
    def _begin(network: Any, callbacks: Iterable[object]) -> None:
        context = training_context.current()
        context.resources.check_loaded(((it.name, it) for it in network.get_parameters()), callbacks, context.plan.resumes)
        heartbeat.enter(FIRST_STEP)
        if context.monitor is not None:
            context.monitor.begin_load_attempt()
        context.emit(NetworkCompiled())

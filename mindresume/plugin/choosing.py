"""The choice of a checkpoint in the trainer: what the configuration asks for, and what the session remembers of the answer."""
from __future__ import annotations

from functools import partial
from typing import Any

from mindresume.events.log_lines import LogLines
from mindresume.plugin import adapter, modelarts, session
from mindresume.plugin.convert import choose_complete, prepare
from mindresume.reshard.strategies import strategies
from mindresume.resume.choosing import CheckpointSelector, SelectionRequest
from mindresume.resume.select import Choice
from mindresume.store.storage import Storage


def choose(config: Any, path: str, named: str | None, current: session.Session, storage: Storage, converts: bool,
           resume: bool = True, healthy: bool = False, as_it_is: bool = False, instead: str = "are initialised at random"
           ) -> Choice | None:
    """None: a fresh start. ``converts``: the number of ranks may differ, so all files are proven by all ranks together, and
    ``current.open_source`` is set. ``resume`` False: weights alone are wanted, so there is no fresh start. ``healthy``:
    what mindformers' health monitor found unhealthy is not taken, unless it is named. ``as_it_is``: what mindformers saved on as
    many ranks as there are is not converted, so that it needs no layouts. ``instead``: ends a sentence on the weights
    of a fresh start.

    Raises NoUsableCheckpointError, MissingCheckpointError or AgreementError on all ranks together."""
    request = SelectionRequest(path, named, converts, resume, as_it_is, instead,
                               health_dir=str(config.get("output_dir") or "") if healthy else None,
                               output_dir=adapter.output_root() if resume and _has_monitor(config) else None)
    chooser = CheckpointSelector(storage, current.group, current.settings, LogLines(adapter.logger()).emit,
                                 partial(choose_complete, current=current, resume=resume),
                                 strategies(storage, config.get("src_strategy_path_or_dir") or None),
                                 current.remote, partial(modelarts.saved_to, config), current.islands)
    found = chooser.select(request)
    if found.choice is None:
        return None
    current.choice = current.resumed_from = found.choice
    current.lost, current.hold, current.trial = found.lost_work, found.read_lock, found.load_attempt
    if found.uses_layouts or found.choice.chosen.base:
        prepare(config, current, storage, aside=resume or adapter.is_parallel())
    return found.choice


def _has_monitor(config: Any) -> bool:
    """Whether somebody will say that a step is done."""
    return any(callback.get("type") == adapter.ALIAS for callback in config.get("callbacks") or [])

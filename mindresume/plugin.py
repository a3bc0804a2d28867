"""Importing this module brings mindresume into mindformers: our CheckpointMonitor in its registry, our hooks in its trainer.

    import mindresume.plugin
    from mindformers import Trainer

``mindresume.plugin.report_metric("eval_loss", 2.31)`` records a measurement with the checkpoints that follow.
"""
from mindresume.mindformers.installation import install
from mindresume.mindformers.training_context import report_metric  # noqa: F401  for the code of users

install()

"""Installs mindresume into mindformers when it is imported: the CheckpointMonitor into its
registry, wrappers into its trainer.

    import mindresume.plugin
    from mindformers import Trainer

``mindresume.plugin.report_metric("eval_loss", 2.31)`` stores a measurement in the checkpoints that
follow.
"""

from mindresume.mindformers.installation import install

# for the code of users
from mindresume.mindformers.training_context import report_metric  # noqa: F401

install()

"""Importing this module brings mindresume into mindformers: our CheckpointMonitor in its registry, our hooks in its trainer.

    import mindresume.plugin
    from mindformers import Trainer

``mindresume.plugin.report_metric("eval_loss", 2.31)`` records a measurement with the checkpoints that follow.
"""
from mindresume.plugin import adapter
from mindresume.plugin.session import report_metric  # noqa: F401  for the code of users


def install() -> None:
    """Idempotent. ConfigError if the installed mindformers has not got the places to hook in."""
    from mindresume.plugin.modelarts import require_moxing
    require_moxing()
    from mindresume.plugin import hooks
    from mindresume.plugin.monitor import CheckpointMonitor
    for sentence in adapter.check_versions():
        adapter.logger().warning("mindresume: %s", sentence)
    adapter.register_monitor(CheckpointMonitor)
    hooks.install()


install()

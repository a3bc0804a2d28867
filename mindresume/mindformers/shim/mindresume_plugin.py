"""Loads mindresume in an unmodified run_mindformer.py of MindSpore Transformers.

    run_mindformer.py ... --register_path "$(mindresume plugin-path)"

    trainer:
      auto_register: mindresume_plugin.MindResume      # add this line beside the existing type:

mindformers copies this file and runs the copy while it builds the trainer, before it looks for a
checkpoint and before it builds the data set or the model. Running it is enough: the class below is
registered, and never instantiated.
"""

import mindresume.plugin


class MindResume:
    """Provides the name for ``auto_register``. ``type:`` in the same block still names the
    trainer."""

    plugin = mindresume.plugin

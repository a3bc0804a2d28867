"""Connects mindresume with mindformers' PyNative trainer
(``mindformers.pynative.trainer.Trainer``), as the modules beside this folder do with the graph
trainer.

    Trainer.train                     ─▶ patches: opens the context of the training
      _load_checkpoint                ─▶ checkpoint_load: selection, counters, tensors
      CheckpointCallback              ─▶ checkpoint_callback: saves through CheckpointManager
      _create_dataset_iterator        ─▶ training_run: the first pass continues, each later one
          begins at 0

The format is Checkpoint 2.0.
"""

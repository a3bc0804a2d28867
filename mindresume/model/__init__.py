"""Defines the content of a checkpoint: layouts, training state, data position, records and
manifest. Pure Python and numpy."""

"""What a checkpoint is: layouts, training state, position in the data, records and manifest. Pure Python and numpy."""

"""Saves checkpoints: the file system behind one seam, shards and their commit, and what retention removes."""

"""Saving a checkpoint: shards, commit, upload, retention and removal."""

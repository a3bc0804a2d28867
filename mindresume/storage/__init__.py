"""Interfaces to the file system and to object stores. No module here knows what a checkpoint is."""

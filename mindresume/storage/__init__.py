"""The one seam to the file system and the one to an object store. Nothing here knows checkpoints."""

"""Where checkpoints live: the file system behind one seam, the commit on top of it, and what is kept."""

"""Which checkpoint a resume takes and why not the others, and where the training then goes on."""

"""Replaces the random digits in names by a counter in each process with this folder on its
PYTHONPATH (and its children), so that the same program makes the same system calls every time.
Python imports a module of this name at its start."""

import itertools
import secrets

_numbers = itertools.count(1)
secrets.token_hex = lambda size=32: f"{next(_numbers):0{2 * size}x}"

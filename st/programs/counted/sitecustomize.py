"""On the PYTHONPATH of a process (and of those it starts) the random digits in names count up, so that the same program makes the
same system calls every time. Python imports a module of this name at its start."""
import itertools
import secrets

_numbers = itertools.count(1)
secrets.token_hex = lambda size=32: f"{next(_numbers):0{2 * size}x}"

"""``python -m mindresume``: the command line."""

from mindresume.cli import main

main()

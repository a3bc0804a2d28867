"""Writes goldens anew: ``python -m tests.judge --update [NAME...]``; without ``--update`` it prints
what would change."""

import os
import sys

from tests.judge.goldens import compared, end, matching, store


def main() -> int:
    """Returns 1 if something differs and was not written."""
    update = "--update" in sys.argv[1:]
    changed = 0
    try:
        for story, case in matching([word for word in sys.argv[1:] if word != "--update"]):
            found, difference = compared(story, case)
            if difference:
                changed += 1
                print(difference, flush=True)
                if update:
                    store(story, case.name, found)
    finally:
        end()
    print(f"{changed} cases differ" + (", written" if update and changed else ""))
    return 1 if changed and not update else 0


if __name__ == "__main__":
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = True
    sys.exit(main())

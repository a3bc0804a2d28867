"""Implements ``mindresume advise``."""
from __future__ import annotations

from mindresume.cli import app
from mindresume.cli.common import AsJson, print_json, say
from mindresume.cli.report import Logs, Output, check_folders


@app.command()
def advise(folder: Output, json: AsJson = False, logs: Logs = None) -> None:
    """Advises how often to save: the interval between saves that loses the least time, by what the training has measured.

    It reads what `report` reads: how long the training stopped for a save, how long a save took, the steps, the failures and the
    restarts. The interval is that of Young and Daly; with few failures its range is wide, and without any it is a bound. Nothing
    is written. docs/advice.md explains the numbers.
    Exit status: 0; 2 if too little was measured.
    """
    from mindresume.report.advice import advise as advise_on
    check_folders(logs or ())
    found = advise_on(folder, logs=logs or ())
    if json:
        print_json(found.to_json())
        return
    from mindresume.report.advice import lines_of
    for name, text in lines_of(found):
        say(f"{name:9}  {text}")

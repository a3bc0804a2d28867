"""Reports on a training over all of its starts, from event files, logs and checkpoints: one page, or one JSON document.

    sources.py, event_log.py ─▶ logs and event files     logs.py ─▶ lines of mindformers     history.py ─▶ run attempts
    losses.py the loss curve, measured and thinned out    account.py steps, seconds and goodput
    disk.py the checkpoints there are                     chart.py, page.py for people        made.py builds the report

A *run attempt* is the time between one start of the training and its end, however it ended. Nothing here imports mindspore or
mindformers.
"""

"""Reports on a training over all of its starts, from event files, logs and checkpoints: one page, or one JSON document.

    log_discovery.py, event_log.py ─▶ logs and event files     log_parser.py ─▶ lines of mindformers     runs.py ─▶ run attempts
    losses.py the loss curve, measured and thinned out    accounting.py steps, seconds and goodput
    checkpoint_state.py the checkpoints there are    chart.py, page.py for people    builder.py builds the report

A *run attempt* is the time between one start of the training and its end, however it ended. Nothing here imports mindspore or
mindformers.
"""

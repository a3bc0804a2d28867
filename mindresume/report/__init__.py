"""Reports on a training over all its starts, from event files, logs and checkpoints: as one page, or as one JSON document.

    log_discovery.py, event_log.py ─▶ logs and event files     log_parser.py ─▶ lines of mindformers     runs.py ─▶ run attempts
    losses.py the measured loss curve, thinned for drawing     accounting.py steps, seconds and goodput
    failure_rate.py, save_interval.py the mathematics of an advice     measurement.py ─▶ advice.py ─▶ advice_text.py
    advise.py an advice for a folder
    recoveries.py the phases of each recovery
    checkpoint_state.py the checkpoints on disk     builder.py builds the report
    page.py the page     tables.py its cells     chart.py its static figure     chart_data.py its interactive charts
    texts.py, phrases.py the texts in English and Chinese

A *run attempt* lasts from one start of the training to its end, however it ends. Nothing here imports mindspore or mindformers.
"""

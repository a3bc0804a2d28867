"""What a training went through, from the logs and records of all its starts: one page, or one JSON document.

    sources.py ─▶ which files     logs.py ─▶ lines become events     history.py ─▶ events become lives
    losses.py the loss curve, measured and thinned out     account.py where time and steps went
    disk.py the checkpoints there are     chart.py, page.py what a person sees     made.py all of it in order

A *life* is the time between one start of the job and its end, however it ended. Nothing here imports mindspore or mindformers.
"""

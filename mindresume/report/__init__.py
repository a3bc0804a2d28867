"""Reports on a training over all its starts, from event files, logs and checkpoints: as one page,
or as one JSON document.

    log_reader.py                 event files of mindresume, logs of mindformers
    runs.py                       run attempts
    accounting.py                 steps, seconds, goodput, recoveries
    builder.py                    the report, its JSON document, how each resume was proved
    advice.py                     how often to save
    page.py                       the page, and the data of its charts; tables.py: its cells
    texts.json, phrases.py        its texts in English and Chinese

A *run attempt* lasts from one start of the training to its end, however it ends. Nothing here
imports mindspore or mindformers.
"""

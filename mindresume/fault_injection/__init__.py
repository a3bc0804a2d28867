"""The drill: injects one fault at each file operation of every way to save, then checks what a
resume would take.

    faults.py     a ``Storage`` in front of the real one: counts operations, injects a fault, drops
                  unflushed data; several ranks in one process, one operation at a time, in an order
                  that a seed decides
    scenarios.py  the workloads: first save, save, save again, background save, pruning, pointers,
                  the next start; what a resume takes afterwards, whether it is right, and whether
                  the next run leaves no other files
    journal.py    what ranks have saved and were promised; whether a resume takes it, and what is
                  left over
    runner.py     one cell for each scenario, format, fault and operation, in worker processes that
                  never outlive the command

``faults.py`` and ``journal.py`` are also the core of the simulated cluster, whose backend is
memory.
"""

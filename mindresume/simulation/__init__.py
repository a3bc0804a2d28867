"""A cluster in one process: hosts, ranks, jobs and a shared file system, on which the product's own code runs unchanged.

    scheduler.py     tasks of which one runs at a time; simulated time; who goes on is decided at every operation
    disk.py          one file system in memory: what is visible, what a loss of power leaves
    mount.py         a ``Storage``: that file system as one process on one host sees it, with caches and faults
    bucket.py        an object store in memory, as pods see it
    cluster.py       hosts, processes, signals, clocks; stand-ins for threads, time and names in the product's modules
    threads.py       threads, locks and queues of simulated processes
    standins.py      these, time and names in the product's modules
    group.py         the collectives of a job
    schedule.py      who goes on where, and what strikes where: a value that can be drawn, printed, shrunk and replayed
    scenarios.py     what jobs do: lives of ranks, in the order in which the trainer calls the product
    oracle.py        what must hold of the disk afterwards
    left_scenarios.py   scenarios that begin with what runs before have left
    remote_*.py      scenarios and oracle of jobs with an object store
    remote_decay.py  the same where objects cannot be read, and checkpoints are not healthy
    more_scenarios.py   quotas, memory limits, copies, and somebody beside a job (desk.py: converts, verifies)
    explore.py       random and systematic search, and shrinking
"""

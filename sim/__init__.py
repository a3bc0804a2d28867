"""Deterministic simulation of a cluster in one process: hosts, ranks, jobs and a shared file system
run the unchanged product.

    scheduler.py             runs one task at a time in simulated time; decides at every operation
                             which task continues
    schedule.py              task switches, faults and clocks of one run: drawn, printed, shrunk and
                             replayed as a value
    disk.py                  an in-memory file system: the visible state, and the state after a
                             power loss
    mount.py                 a ``Storage`` on that file system as one process on one host sees it,
                             with caches and faults
    bucket.py                an in-memory object store as pods see it
    cluster.py               hosts, processes, signals, clocks
    threads.py               threads, locks and queues of simulated processes
    machine.py               answers what the product asks of the machine: time, threads, signals,
                             names, memory, a writer process
    communicator.py          the collectives of a job; network.py: connections between nodes
    bit_rot.py               lets a bit of a kept file flip, and remembers what was written
    jobs.py                  a job: its launcher, and what each rank does, in the order in which the
                             trainer calls the product
    commands.py              what users run beside a job: convert, verify, scrub, prune, read
    scenarios.py             a scenario, and one run of it (``Simulation``)
    catalogue.py             all scenarios, as data: workload, training, past, faults and invariants
    workloads.py             which jobs run, when, and what was there before; supervisors.py:
                             several nodes; partners.py: partner copies, with their invariants
    oracle.py                the invariants that the disks must satisfy after a run;
                             bucket_oracle.py: those of a bucket
    run_checks.py            the invariants of the run itself
    search.py                random and systematic search for a failing schedule, shrinking, and
                             shards for worker processes

What ranks save and were promised (``journal.py``), faults and worker processes are those of
``mindresume.fault_injection``.
"""

"""Deterministic simulation of a cluster in one process: hosts, ranks, jobs and a shared file system run the unchanged product.

    scheduler.py             runs one task at a time in simulated time; decides at every operation which task continues
    schedule.py              task switches, faults and clocks of one run: drawn, printed, shrunk and replayed as a value
    disk.py                  an in-memory file system: the visible state, and the state after a power loss
    mount.py                 a ``Storage`` on that file system as one process on one host sees it, with caches and faults
    bucket.py                an in-memory object store as pods see it
    cluster.py               hosts, processes, signals, clocks
    threads.py               threads, locks and queues of simulated processes
    writer_process.py        the writer of ``async_save: process`` as a simulated process
    machine.py               answers what the product asks of the machine: time, threads, signals, names, memory
    communicator.py          the collectives of a job
    bit_rot.py               lets a bit of a kept file flip, and remembers what was written
    saved_content.py         what the ranks save, and whether a checkpoint holds it
    jobs.py                  a job: its launcher, and what each rank does, in the order in which the trainer calls the product
    scenarios.py             which jobs run, on which disks; one run of a scenario (``Simulation``)
    leftover_scenarios.py    scenarios that start with the remains of earlier runs
    environment_scenarios.py quotas, memory limits, copied folders, and commands that run beside a job
    rot_scenarios.py         checkpoints rot on disk, beside a scrub that repairs, and in memory
    concurrent_commands.py   those commands: convert, verify, scrub
    bucket_scenarios.py      jobs with an object store; bucket_fault_scenarios.py: unreadable objects, unhealthy checkpoints
    oracle.py                the invariants that the disks must satisfy after a run; bucket_oracle.py: those of a bucket
    search.py                random and systematic search for a failing schedule, and shrinking
    search_shards.py         cuts a search into shards for worker processes
"""

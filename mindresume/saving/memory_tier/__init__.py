"""Saves often into memory of the node: a second checkpoint directory on a tmpfs, in the format of
the first.

    {dir}/mindresume-{uid}/{key}/       one tier: rank folders or hidden iteration folders with
                                        records, as on disk
        owner.json                      which training it belongs to, and its processes on this node
        on-disk.json                    the newest checkpoint that its training is known to have on
                                        disk
        slots/                          files that are being overwritten; never read
    {checkpoint directory}/.mindresume/memory-tier      the token from which ``key`` follows

    directory    where the tier of a checkpoint directory lies; whether it still belongs to it; what
                 its training has on disk, so that nothing is brought back that a person has removed
    slots        the memory of one rank, and the copy of a save into it; which save is overwritten
                 next, and why all ranks keep a common one; saves of earlier runs
    tier         saves: copy in the training thread, checksums and record in the background
    opening      finds or makes the tier, on all ranks together; removes tiers of dead jobs

A save is whole once the records of all ranks of its node exist; there is no manifest and no commit
by one rank. The tier survives the death of processes. It does not survive the node, and is never
called durable.
"""

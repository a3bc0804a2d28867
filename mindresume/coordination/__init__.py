"""Makes several processes agree: collectives with errors, leases and read locks, storage topology,
visibility, preemption.

lease_acquisition ─▶ lease      one job saves to a directory            read_locks    what is read
    is not removed
collectives                     one result on all ranks, or one error   preemption    one step at
                                which all ranks leave
storage_topology, common_checkpoint, peer_state   nodes that share no disk
"""

"""Makes several processes agree: collectives with errors, leases and read locks, storage topology,
visibility, preemption.

lease_acquisition ─▶ lease      one job saves to a directory; what is read is not removed
collectives                     one result on all ranks, or one error
preemption                      one step at which all ranks leave
storage_topology                nodes that share no disk
liveness                        whether a process, or a member of a shared folder, is alive
"""

"""What several processes agree on: collectives with errors, leases, storage topology, visibility."""

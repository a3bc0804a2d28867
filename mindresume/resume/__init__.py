"""Selects the checkpoint of a resume, verifies it, and computes where the training continues.

job_selection              selects and protects the checkpoint of one job
  selection                the one function that job and command line call: in which order the
                           sources are asked
    sources                one folder that all ranks see, or those of nodes that share no storage;
                           all ranks verify together
    bucket_source          fetches newer checkpoints from an object store
    memory_source          saves in memory of the nodes
      candidates           the candidates that a path means, the status of each; every byte of all
                           of them
      eligible             the one rule by which a candidate is refused; its files: names and sizes
      verifier             every byte of one rank's files; replicas
progress                   where the training continues; what was restored
"""

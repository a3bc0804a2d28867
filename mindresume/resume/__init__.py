"""Selects the checkpoint of a resume, verifies it, and computes where the training continues.

    job_selection              selects and protects the checkpoint of one job
      selection                the one function that job and command line call
        remote_selection       fetches newer checkpoints from an object store (remote_fetch)
        shared_selection       selects in a folder that all ranks see
        node_local_selection   selects where nodes share no storage
          candidates           the candidates that a path means
          eligible             all files of a candidate: names and sizes
          group_verification   all ranks together: verifier (one rank), metadata_verifier, replicas
    candidates, folder_verification all checkpoints of a folder: their status; every byte of them
    progress, resume_summary        where the training continues; what was restored
"""

"""Saves checkpoints: writes, commits, uploads and removes them.

checkpoint_manager (save_policy: which steps) ─▶ SyncSaver or AsyncSaver ─▶ shard_writer: files,
    record
rank 0: committer ─▶ manifest, pointers (iteration_publisher) ─▶ retention ─▶ garbage_collector;
    uploader
completed_step does what a run that died did not do for the last step of a training
save_session acquires the directory before; crash_loop counts failed loads
"""

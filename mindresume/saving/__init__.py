"""Saves checkpoints: writes, commits, uploads and removes them.

checkpoint_manager (save_policy: which steps) ─▶ SyncSaver or AsyncSaver ─▶ shard_writer: files,
    record
rank 0: committer ─▶ manifest, pointers (iteration_publisher) ─▶ retention ─▶ garbage_collector;
    uploader
save_session acquires the directory before, or does for a complete training what a run that died did
    not do; crash_loop counts failed loads
"""

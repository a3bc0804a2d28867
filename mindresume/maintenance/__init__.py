"""Re-reads the checkpoints that are kept, while no job waits for them, and mends what is damaged.

scrub    every byte of each checkpoint against its checksums ─▶ the result that selections read
repair   damaged parts of a file ─▶ from replicas of other ranks, or from the bucket
"""

from memory_tiers import memory

__all__ = ["memory"]

from memory_tiers import memory, root, tier

__all__ = ["memory", "root", "tier"]

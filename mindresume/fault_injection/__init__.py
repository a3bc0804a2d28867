"""The drill: every operation of every way to save fails, is killed or loses its power once, and then: what would be resumed?

    faults.py     a file system in front of the real one: counts operations, makes them fail, forgets what was not flushed
    ranks.py      several ranks in one process, one operation at a time, in an order that a seed decides
    scenarios.py  what is attacked: first save, save, save again, background save, removal, pointers, the next start
    oracle.py     what a resume would take afterwards, whether it is right, and whether the next life leaves things tidy
    runner.py     story x format x fault x operation = one cell each
"""

"""Tensors from one layout to another: which bytes of which file, and nothing else read.

    weights    a checkpoint of any kind as {name: Tensor}; where each piece of a tensor lies
    geometry   regions of a tensor: overlaps, contiguous runs, blocks of bounded size
    target     which region of which tensor each new file holds
    direct     reads every source byte once, in order, and writes every target byte once, in order
"""

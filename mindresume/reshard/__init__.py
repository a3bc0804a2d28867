"""Converts tensors from one layout to another, and reads only the bytes that are needed.

checkpoint_view   views a checkpoint of any format as {name: Tensor}, and locates each slice of a
                  tensor
geometry          regions of a tensor: overlaps, contiguous runs, blocks of bounded size
tensor_checks     refuses to cut tensors whose elements are ordered within each slice
conversion_plan   which region of which tensor each new file holds
direct_engine     reads every source byte once, in order, and writes every target byte once, in
                  order
"""

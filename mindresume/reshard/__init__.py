"""Converts tensors from one layout to another, and reads only the bytes that are needed.

checkpoint_view   views a checkpoint of any format as {name: Tensor}, locates each slice of a
                  tensor, and refuses to cut tensors whose elements are ordered within each slice
range_reader      reads regions of tensors from many files, and compares checksums on the way
conversion_plan   which region of which tensor each new file holds
direct_engine     reads every source byte once, in order, and writes every target byte once, in
                  order
"""

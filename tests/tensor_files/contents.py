"""Files of tensors in memory: their bytes, and what is read from them."""

import io

from mindresume.tensor_files import encode, read_header, read_tensor


def content(fmt, tensors, metadata=None):
    return b"".join(piece for _, piece in encode(fmt, tensors, metadata or {}))


def read_all(data, fmt):
    """(header, {name: array})"""
    file = io.BytesIO(data)
    header = read_header(file, f"x.{fmt}")
    return header, {name: read_tensor(file, entry) for name, entry in header.tensors.items()}


def described(tensors):
    return {
        name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()
    }

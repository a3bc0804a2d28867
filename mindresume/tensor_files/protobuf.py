"""Encodes and decodes protobuf varints, as in MindSpore's checkpoint and strategy files. The protobuf package is not imported."""
from __future__ import annotations

MAX_VARINT = 10             # bytes
_BITS = (1 << 64) - 1


def encode_varint(value: int) -> bytes:
    """Encodes an integer of 64 bits; a negative one takes ten bytes."""
    value &= _BITS
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, position: int = 0) -> tuple[int, int]:
    """Returns the unsigned integer at ``position`` (up to 70 bits: the caller checks its range) and the position after it. Raises
    ValueError if it does not end within MAX_VARINT bytes, or ``data`` ends first."""
    found = data[position:position + MAX_VARINT]
    if found and found[0] < 0x80:               # fast path: most numbers are tags and lengths of one byte
        return found[0], position + 1
    value = shift = 0
    for byte in found:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position + shift // 7
    raise ValueError(f"a number does not end at byte {max(position + len(found) - 1, position)}")


def signed(value: int) -> int:
    """Returns the 64-bit two's complement integer whose unsigned form is ``value``."""
    return value if value < 1 << 63 else (value & _BITS) - (1 << 64)

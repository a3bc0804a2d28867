"""Varints of protocol buffers, as MindSpore's checkpoint and strategy files hold them: no protobuf package is imported."""
from __future__ import annotations

MAX_VARINT = 10             # bytes of one
_BITS = (1 << 64) - 1


def encode_varint(value: int) -> bytes:
    """Encodes a whole number of 64 bits; a negative one takes ten bytes."""
    value &= _BITS
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, position: int = 0) -> tuple[int, int]:
    """Returns the unsigned number at ``position`` (of up to 70 bits: the caller checks its range) and the position behind it.
    ValueError if it does not end within MAX_VARINT bytes, or ``data`` ends before."""
    found = data[position:position + MAX_VARINT]
    if found and found[0] < 0x80:               # most numbers are tags and lengths of one byte
        return found[0], position + 1
    value = shift = 0
    for byte in found:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position + shift // 7
    raise ValueError(f"a number has no end at byte {max(position + len(found) - 1, position)}")


def signed(value: int) -> int:
    """Returns the number of 64 bits in two's complement whose unsigned form is ``value``."""
    return value if value < 1 << 63 else (value & _BITS) - (1 << 64)

"""Varints: numbers of 64 bits, as protobuf writes them."""
import pytest

from mindresume.tensor_files.protobuf import decode_varint, encode_varint, signed


@pytest.mark.parametrize("value, data", [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"),
                                         (2**64 - 1, b"\xff" * 9 + b"\x01"), (-1, b"\xff" * 9 + b"\x01")])
def test_encoding_and_decoding(value, data):
    assert encode_varint(value) == data
    assert decode_varint(b"x" + data + b"y", 1) == (value % 2**64, 1 + len(data))
    assert signed(value % 2**64) == (-1 if value in (-1, 2**64 - 1) else value)


@pytest.mark.parametrize("data, position", [(b"", 0), (b"\x80", 0), (b"\xff" * 20, 0), (b"\x01", 1)])
def test_a_number_without_an_end(data, position):
    with pytest.raises(ValueError, match="does not end"):
        decode_varint(data, position)

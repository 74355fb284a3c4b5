"""CRC-32, the same as zlib's: by Intel's ISA-L where it is installed (`pip install 'hsdp[fast]'`), many times as fast, else
with NumPy's exclusive or, up to twice as fast.

A CRC is the remainder of a polynomial over GF(2), the data's bits its coefficients. The divisor has the multiple
x^130360 + x^24749 + 1, hence also x^(8a) + x^(8b) + 1 with these two as a and b, squared three times. So the data may be
taken in rows of `a` bytes, and everything before a row be added to it as it is, and once more `b` bytes further up:

    sum so far     |h|  s        |        h: the first b bytes
    its new value  |  row        |  +  |h|  s        |  +  |  s        |h|  +  |        |h|  |

Both leave out of account that what moves up beyond the row's beginning, h, comes back: at its end, and b bytes above.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

_ROW = 130360
_SHIFT = 24749
_LEAST = 8 * _ROW
"""Bytes from which on rows pay: zlib sums the last one, too."""
_BLOCK, _READ = 3 << 19, 1 << 20
"""Bytes that are mapped, or else read, at a time; pages that are mapped count as memory of the process."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, for which Python has no name."""


def _by_rows(numpy: Any) -> Callable[..., int]:
    xor = numpy.bitwise_xor

    def crc32(data: bytes | bytearray | memoryview, before: int = 0) -> int:
        count = len(data) // _ROW
        if len(data) < _LEAST:
            return zlib.crc32(data, before)
        rows = numpy.frombuffer(data, numpy.uint8, count * _ROW).reshape(count, _ROW)
        this, other = rows[0].copy(), numpy.empty_like(rows[0])
        # zlib's checksums begin with a register of ones, which is added to the first four bytes, and end inverted.
        this[:4] ^= numpy.frombuffer((before ^ 0xFFFFFFFF).to_bytes(4, "little"), numpy.uint8)
        for row in rows[1:]:
            end, above = other[_ROW - _SHIFT :], other[_ROW - 2 * _SHIFT : _ROW - _SHIFT]
            xor(this, row, out=other)
            xor(other[: _ROW - _SHIFT], this[_SHIFT:], out=other[: _ROW - _SHIFT])
            for place in (end, above):
                xor(place, this[:_SHIFT], out=place)
            this, other = other, this
        return zlib.crc32(memoryview(data)[count * _ROW :], zlib.crc32(this, 0xFFFFFFFF))

    return crc32


def _fastest() -> Callable[..., int]:
    try:
        found: Callable[..., int] = import_module("isal.isal_zlib").crc32
    except ImportError:  # not installed, or not for this processor
        try:
            return _by_rows(import_module("numpy"))
        except ImportError:
            return zlib.crc32
    return found


crc32_of = _fastest()
"""`crc32_of(data, before=0)`: the checksum of data, or of data behind what `before` is the checksum of."""


def crc32_of_file(stream: BinaryIO) -> int:
    """The checksum of a file from its beginning to its end.

    Its pages are looked at where the kernel has them, a copy of each taking as long as its checksum. Memory that is mapped
    from a file ends the process (SIGBUS) where the disk fails, so each block is first brought in by a call that returns the
    error, and is mapped only while it is looked at. What cannot be mapped so is read.

    Raises:
        OSError: it cannot be read.
    """
    crc32, at = 0, 0
    if isinstance(stream, io.FileIO):
        with contextlib.suppress(OSError, ValueError):
            file = stream.fileno()
            size = os.fstat(file).st_size
            while at < size:
                count = min(_BLOCK, size - at)
                with mmap.mmap(file, count, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=at) as block:
                    block.madvise(_POPULATE_READ)
                    os.posix_fadvise(file, at + count, _BLOCK, os.POSIX_FADV_WILLNEED)  # the next one, while this is summed
                    crc32 = crc32_of(block, crc32)
                at += count
    stream.seek(at)
    buffer = memoryview(bytearray(_READ))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        crc32 = crc32_of(buffer[:count], crc32)
    return crc32


# -- putting checksums together -----------------------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320


def combine_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, of those of each; `length` is the second's."""
    power, place, factor = 1 << 31, 3, length  # x^0; then x^(8 * length), by repeated squaring
    while factor:
        if factor & 1:
            power = _multiplied(_SQUARES[place % 32], power)
        factor >>= 1
        place += 1
    return _multiplied(power, first) ^ second


def _multiplied(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32; bits in CRC-32's reflected order."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _squares() -> list[int]:
    found = [1 << 30]  # x
    while len(found) < 32:
        found.append(_multiplied(found[-1], found[-1]))
    return found


_SQUARES = _squares()
"""x^(2^n) for each n."""

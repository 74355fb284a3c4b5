"""Numbers as people read them: three digits, and the next unit where a value rounds up to it."""

from __future__ import annotations

import pytest

from hsdp.format import bytes_of, count_of, seconds_of


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (bytes_of(999), "999 B"),
        (bytes_of(1.25 * 2**30), "1.25 GiB"),
        (bytes_of(999.7 * 2**10), "0.976 MiB"),
        (bytes_of(12_345 * 2**40), "12,345 TiB"),
        (seconds_of(0.0125), "12.5 ms"),
        (seconds_of(0.9996), "1 s"),
        (seconds_of(1234.5), "1,234 s"),
        (seconds_of(0), "0 us"),
        (count_of(7.06e10), "70.6 B"),
        (count_of(999_800), "1 M"),
        (count_of(999), "999"),
        (count_of(1.8e12), "1,800 B"),
    ],
)
def test_no_number_is_written_with_an_exponent(told: str, expected: str) -> None:
    assert told == expected

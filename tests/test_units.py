"""Units: input is parsed exactly, and output has three digits and never rolls over its unit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 85899345920),
        ("1.5 GB", 1_500_000_000),
        (" 12 kib ", 12288),
        ("4096", 4096),
        (4096, 4096),
        ("1_000B", 1000),
        (".5KiB", 512),
        ("9007199254740993", 9007199254740993),  # one more than a float can represent
    ],
)
def test_parse_bytes(text, size):
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 XB", "1e3", "-5", "12 GiB 3", "9" * 400, "٣GiB", "nan", -1, True])
def test_invalid_bytes(text):
    with pytest.raises(ValueError, match="Write a "):
        units.parse_bytes(text)


def test_parse_count():
    assert units.parse_count("4M") == 4_000_000
    assert units.parse_count("1_000") == 1000
    assert units.parse_count("1.5e12") == 1_500_000_000_000
    assert units.parse_count(" 2E+3 ") == 2000
    assert units.parse_count(7) == 7
    for text in ("4GiB", -7, False, "9" * 400):
        with pytest.raises(ValueError, match="is not a count"):
            units.parse_count(text)


def test_parse_seconds():
    assert units.parse_seconds("15min") == 900
    assert units.parse_seconds("2h") == 7200
    assert units.parse_seconds("250ms") == 0.25
    assert units.parse_seconds(3) == 3.0
    assert units.parse_seconds("3h30m") == 12600
    assert units.parse_seconds("1d2h5s") == 93605
    for text in ("15 years", -1, math.nan, math.inf, True):
        with pytest.raises(ValueError, match="is not a duration"):
            units.parse_seconds(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1023.9, "1.00 KiB"), (13314398617, "12.4 GiB"), (2**40 - 1, "1.00 TiB")],
)
def test_format_bytes(number, text):
    assert units.format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512"), (0.5, "0.50"), (999.7, "1.00 k"), (999_600, "1.00 M"), (8030261248, "8.03 B"), (5e15, "5000 T")],
)
def test_format_count(number, text):
    assert units.format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (2e-7, "0.20 us"),
        (59.97, "1:00"),
        (75, "1:15"),
        (7322, "2:02:02"),
        (-75, "-1:15"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_format_seconds(number, text):
    assert units.format_seconds(number) == text


def test_counted():
    assert [units.counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert units.counted(2, "piece of text", "pieces of text") == "2 pieces of text"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**60))
def test_printed_size_can_be_parsed_to_three_digits(num_bytes):
    again = units.parse_bytes(units.format_bytes(num_bytes))
    assert abs(again - num_bytes) <= 0.006 * num_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("300GB/s", 3e11),
        ("400Gb/s", 5e10),
        ("400Gbps", 5e10),
        ("3.35 TB/s", 3.35e12),
        ("1GiB/s", 2**30),
        ("8kB/s", 8e3),
    ],
)
def test_parse_rate(text, rate):
    assert units.parse_rate(text) == rate


def test_invalid_rates_and_speeds():
    for text in ("300", "300GB", "300gb/s", "GB/s", "-3GB/s", "3 4GB/s", "1e3GB/s", ""):
        with pytest.raises(ValueError, match="is not a rate"):
            units.parse_rate(text)
    for text in ("120", "120T", "120TB/s", "TFLOPS", "-1TFLOPS"):
        with pytest.raises(ValueError, match="is not a number of operations per second"):
            units.parse_flops(text)
    assert units.parse_flops("120TFLOPS") == units.parse_flops("0.12 PFLOP/s") == 120e12

"""Notations of link and memory rates, sizes, lengths and batches in published sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.planner.cells import device_gib, gibibytes, memory_bytes_per_s, network_bytes_per_s, sequences, tokens

GIGA = 1e9


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("NVLink4 + 8x50GB/s IB", 50e9),
        ("8 x 50 GB/s InfiniBand", 50e9),
        ("8x400Gb/s NDR", 50e9),
        ("8 × 400 Gbps RoCE per node", 50e9),
        ("8x200Gb HDR IB per node", 25e9),
        ("4x200Gb HDR IB per node (800 Gb/s)", 12.5e9),
        ("1600 Gbps node-node interconnect (RoCE)", 25e9),
        ("EFA 3.2 Tbps per node", 50e9),
        ("3200 Gbit/s EFA", 50e9),
        ("400Gb RoCE per GPU, H100 700W", 50e9),
        ("50 GB/s per GPU", 50e9),
        ("InfiniBand NDR 400Gb/s", 50e9),
        ("network 400Gb/s per node as printed", 6.25e9),
        ("400 GB/s per node over Ethernet", 50e9),
        ("H100 96GB HBM2e 2.4TB/s, 400Gb/s per GPU", 50e9),
        ("NVLink 900 GB/s", None),
        ("HBM3e at 4.8TB/s", None),
        ("PCIe 64GB/s, NVMe 7 GB/s", None),
        ("A100 40GB, RoCE", None),
        ("MP mode DEFAULT (amp_bf16); grp=2866cefa; MBS 1", None),
    ],
)
def test_network_rates_of_an_eight_gpu_node(text, rate):
    found = network_bytes_per_s(text, 8)
    assert found == (rate if rate is None else pytest.approx(rate))


_COUNTS = st.sampled_from([1, 2, 4, 8, 16])
_GIGABYTES = st.sampled_from([6.25, 12.5, 25, 50, 100])
_PER_NODE = st.sampled_from([4, 8, 16])
_TIMES = st.sampled_from([" x ", "x", " × ", "*"])


@given(_COUNTS, _GIGABYTES, _PER_NODE, _TIMES, st.sampled_from(["", " "]), st.sampled_from(["IB", "RoCE", "EFA"]))
def test_bits_and_bytes_agree(count, gigabytes, per_node, times, space, net):
    """One link in bytes, bits, kilobits and terabits gives one rate."""
    expected = pytest.approx(count * gigabytes * GIGA / per_node)
    bits = gigabytes * 8
    for text in (
        f"{count}{times}{gigabytes}{space}GB/s {net}",
        f"{count}{times}{bits}{space}Gb/s {net}",
        f"{count}{times}{bits}{space}Gbps {net}",
        f"{count}{times}{bits}{space}Gbit/s {net}",
        f"{count}{times}{bits / 1000}{space}Tbps {net}",
        f"{count}{times}{bits * 1000}{space}Mb/s {net}",
        f"{count * bits} Gbps {net} per node",
        f"{count * gigabytes} GB/s per node {net}",
    ):
        assert network_bytes_per_s(text, per_node) == expected, text


@given(_GIGABYTES, _PER_NODE, st.sampled_from(["GPU", "gpu", "device", "accelerator"]))
def test_rate_per_device_is_not_divided(gigabytes, per_node, word):
    for text in (f"{gigabytes} GB/s per {word}", f"{gigabytes * 8} Gb/s per {word}", f"{gigabytes * 8}Gbps/{word}"):
        assert network_bytes_per_s(text, per_node) == pytest.approx(gigabytes * GIGA), text


@given(st.floats(0.5, 20).map(lambda value: round(value, 2)))
def test_memory_rate_is_distinguished_from_links(terabytes):
    text = f"H100, HBM3 {terabytes} TB/s, NVLink 900 GB/s, 8x50GB/s IB"
    assert memory_bytes_per_s(text) == pytest.approx(terabytes * 1e12)
    assert network_bytes_per_s(text, 8) == pytest.approx(50e9)


@given(st.integers(8, 300))
def test_device_memory_is_read_from_names(gib):
    for name in (f"a100-{gib}gb-sxm", f"H100 {gib}G", f"h200_{gib}GiB", f"b200 {gib} GB"):
        assert device_gib(name) == gib, name
    assert device_gib("h100-sxm-700w") is None


@given(st.floats(1, 2000).map(lambda value: round(value, 2)))
def test_memory_size_notations(value):
    assert gibibytes(f"{value}") == value
    assert gibibytes(f"{value} GiB") == gibibytes(f"{value}GiB") == pytest.approx(value)
    assert gibibytes(f"{value} GB") == pytest.approx(value * 1e9 / 2**30)
    assert gibibytes(f"{value * 1024} MiB") == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("4,096", 4096),
        ("4k", 4096),
        ("8K", 8192),
        ("128k", 131_072),
        ("131k", 131_072),
        ("65k", 65_536),
        ("262k tokens", 262_144),
        ("1M", 1_048_576),
        ("many", None),
        ("", None),
    ],
)
def test_sequence_length_notations(text, length):
    assert tokens(text) == length


@given(st.integers(1, 4096).map(lambda n: 1024 * n))
def test_length_with_commas_reads_equal(length):
    assert tokens(str(length)) == tokens(f"{length:,}") == length


@given(st.integers(0, 7).map(lambda n: 2**n), st.sampled_from([2048, 4096, 8192]))
def test_batches_in_tokens_equal_batches_in_sequences(millions, seq_len):
    count = millions * 2**20 / seq_len
    assert sequences(f"{millions}M tokens", seq_len) == sequences(f"{millions}M", seq_len) == count
    assert sequences(f"{count:,.0f}", seq_len) == sequences(f"{count:.0f} sequences", seq_len) == count

"""Clusters and the table of devices."""

from __future__ import annotations

import math

import pytest

from weft.config.cluster import TOPOLOGIES, ClusterSpec, described_clusters, device, device_by_torch_name, devices
from weft.config.tpu_slices import ARRANGEMENTS, slice_name
from weft.errors import ConfigError


def test_cluster_shorthand_is_parsed():
    cluster = ClusterSpec.parse("2048x8xh100")
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (2048, 8, "h100")
    assert cluster.num_devices == 16384
    assert str(cluster) == "2048x8xh100"
    assert ClusterSpec.parse("8xh100").num_devices == 8
    assert ClusterSpec.parse("h200") == ClusterSpec.parse("1xH200")
    assert ClusterSpec.parse("2x4x4090").device.name == "rtx4090"
    for name in devices():
        assert str(ClusterSpec.parse(f"3x2x{name}")) == f"3x2x{name}"
    assert len({cluster, ClusterSpec.parse("2048x8xh100")}) == 1


def test_device_table_is_complete_and_plausible():
    table = devices()
    assert len(table) == 54
    for spec in table.values():
        assert spec.title
        assert spec.sources
        assert set(spec.sources.split(",")) <= {"D", "S", "W"}
        assert spec.scale_up_topology in TOPOLOGIES
        least = 0.1 if spec.title.startswith("Apple") else 1.0
        assert 16 * 2**30 <= spec.memory_bytes < 520 * 2**30
        assert least * 0.3e12 <= spec.memory_bytes_per_s + 40e9 < 10e12
        assert all(least * 20e12 < peak < 2e16 for _, peak in spec.peaks)
        top = spec.peak_flops("bf16") or spec.peak_flops("fp16")
        assert top is not None
        assert spec.measured_flops is None or 0.4 * top < spec.measured_flops < top
        assert 1 <= spec.measured_spread < 1.2


def test_chosen_rows_of_the_device_table():
    h100 = device("h100")
    assert h100.peak_flops("bf16") == 989e12
    assert h100.peak_flops("fp8") == 1979e12
    assert h100.memory_bytes == 80 * 2**30
    assert h100.memory_bytes_per_s == 3.35e12
    assert (h100.scale_up_bytes_per_s, h100.scale_up_domain) == (450e9, 8)
    assert (h100.nic_bytes_per_s, h100.host_bytes_per_s, h100.watts, h100.measured_flops) == (50e9, 55e9, 700, 794e12)
    assert device("gb200").scale_up_domain == 72
    assert device("v100").peak_flops("bf16") is None
    assert device("tpu-v5e").watts is None


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_are_found_by_torch_name(torch_name, name):
    found = device_by_torch_name(torch_name)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "torch_name",
    ["", "NVIDIA H2000", "NVIDIA L40", "Tesla T40", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB"],
)
def test_unknown_torch_names_are_not_found(torch_name):
    assert device_by_torch_name(torch_name) is None


def test_unknown_devices_and_shapes_are_rejected():
    with pytest.raises(ConfigError, match=r"device=h10: unknown device. Did you mean 'h100'\? Known: v100,"):
        ClusterSpec.parse("8xh10")
    with pytest.raises(ConfigError, match=r"Write e\.g\. '2x8xh100'"):
        ClusterSpec.parse("")
    with pytest.raises(ConfigError, match="at least one device"):
        ClusterSpec.parse("0x8xh100")


def test_cluster_file_is_loaded(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('nodes = 4\ndevices_per_node = 8\n[device]\nlike = "h100"\nwatts = 500\nnic_gb_s = 12.5\n')
    cluster = ClusterSpec.load(path)
    assert cluster.num_devices == 32
    assert (cluster.device.watts, cluster.device.nic_bytes_per_s) == (500, 12.5e9)
    assert cluster.device.peaks == device("h100").peaks
    assert cluster.device.name != "h100"
    path.write_text('devices_per_node = 8\ndevice = "a100"')
    assert ClusterSpec.load(path) == ClusterSpec.parse("8xa100")


def test_user_defined_device_is_read():
    own = {"name": "npu", "tflops": {"bf16": 100}, "memory_gib": 32, "memory_gb_s": 1000}
    spec = ClusterSpec.from_mapping({"devices_per_node": 2, "device": own}).device
    assert (spec.name, spec.peak_flops("bf16"), spec.nic_bytes_per_s) == ("npu", 100e12, None)


def test_all_mistakes_of_a_cluster_are_reported():
    table = {
        "node": 3,
        "devices_per_node": 0,
        "device": {"like": "h100", "wats": 3, "memory_gib": -1, "tflops": {"bf61": 3}, "scale_up_topology": "ring"},
    }
    with pytest.raises(ConfigError) as caught:
        ClusterSpec.from_mapping(table, "c.toml")
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["node", "devices_per_node", "wats", "memory_gib", "tflops", "scale_up_topology"]
    assert all(problem.origin == "c.toml" for problem in caught.value.problems)


@pytest.mark.parametrize("value", [None, 3, [], {"like": 3}, {"memory_gib": math.nan}, {"watts": 10**400},
                                   {"aliases": "x"}, {"title": 3}, {"tflops": 3}, {"like": "h1oo"}])  # fmt: skip
def test_invalid_devices_are_rejected(value):
    with pytest.raises(ConfigError):
        ClusterSpec.from_mapping({"devices_per_node": 1, "device": value})


@pytest.mark.parametrize("data", [b"nodes = ", b"\xff", b"a = " + b"[" * 5000])
def test_invalid_cluster_files_are_rejected(tmp_path, data):
    path = tmp_path / "cluster.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cluster\.toml"):
        ClusterSpec.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ClusterSpec.load(tmp_path / "none.toml")


def test_power_cap_reduces_the_measured_rate():
    """The matmul rate decreases less than proportionally with the power cap. A measured rate is not scaled."""
    full = device("h100").measured_flops
    table = {"devices_per_node": 8, "device": {"like": "h100", "watts": 500}}
    capped = ClusterSpec.from_mapping(table).device.measured_flops
    assert 500 / 700 < capped / full < 0.8
    table["device"]["measured_tflops"] = 700
    assert ClusterSpec.from_mapping(table).device.measured_flops == 700e12
    more = ClusterSpec.from_mapping({"devices_per_node": 8, "device": {"like": "h100", "watts": 800}})
    assert more.device.measured_flops == full


def test_rack_settings_are_read_and_checked():
    table = {"nodes": 8, "devices_per_node": 8, "device": "h100", "rack_nodes": 4, "oversubscription": 2}
    cluster = ClusterSpec.from_mapping(table)
    assert (cluster.rack_nodes, cluster.oversubscription) == (4, 2.0)
    for invalid in ({"rack_nodes": -1}, {"oversubscription": 0.5}, {"rack_nodes": 0}):
        with pytest.raises(ConfigError, match=r"Use e\.g\.|Give rack_nodes"):
            ClusterSpec.from_mapping({**table, **invalid})


def test_shared_host_link_divides_bandwidth():
    table = {"devices_per_node": 8, "device": "a100"}
    unshared, shared = (ClusterSpec.from_mapping({**table, "devices_per_host_link": count}).device for count in (1, 2))
    assert unshared == device("a100")
    assert shared.host_bytes_per_s == unshared.host_bytes_per_s / 2
    with pytest.raises(ConfigError, match="from 1 to 64"):
        ClusterSpec.from_mapping({**table, "devices_per_host_link": 0})


def test_mixed_cluster_is_limited_by_its_slowest_device():
    found = ClusterSpec.parse("8xh100+2x8xa100-40")
    assert (found.nodes, found.devices_per_node, str(found)) == (3, 8, "8xh100+16xa100-40")
    least, fast = device("a100-40"), device("h100")
    assert found.device.name == "a100-40*"
    assert (found.device.memory_bytes, found.device.measured_flops) == (least.memory_bytes, least.measured_flops)
    assert found.device.peak_flops("fp8") is None
    assert found.device.watts == pytest.approx((fast.watts + 2 * least.watts) / 3)
    assert ClusterSpec.parse("8xh100+8xh100") == ClusterSpec.parse("2x8xh100")


def test_nodes_must_have_equal_device_counts():
    with pytest.raises(ConfigError, match=r"one number of devices\. Write e\.g\. '2x4xh100\+1x4xa100'"):
        ClusterSpec.parse("8xh100+4xa100")
    with pytest.raises(ConfigError, match=r"--run and --tune all.*8xh100\+8xa100"):
        ClusterSpec.parse("8xh100,8xa100")


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("16xa100-40gb", "2x8xa100-40"),
        ("a100-80gb", "1xa100"),
        ("8xh100_80GB", "8xh100"),
        ("h200-141gb", "1xh200"),
        ("2x8xa100 80GB", "2x8xa100"),
        ("rtx 4090", "1xrtx4090"),
        ("64xh100", "8x8xh100"),
        ("6xh100", "6xh100"),
        ("64xgb200", "64xgb200"),
    ],
)
def test_alternative_spellings_are_parsed(text, cluster):
    assert str(ClusterSpec.parse(text)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v100-16gb",
            "device=v100-16gb: there are data for the v100 with 32 GiB. For another size write 'v100 memory=16GiB'.",
        ),
        (
            "12xh100",
            "cluster=12xh100: a node has at most 8 h100, and 12 is not a multiple of 8. "
            "Write nodes x devices, such as '2x6xh100'.",
        ),
    ],
)
def test_other_memory_sizes_and_uneven_nodes_are_rejected(text, message):
    with pytest.raises(ConfigError) as caught:
        ClusterSpec.parse(text)
    assert str(caught.value) == message


NPU = "npu memory=24GiB bf16=120TFLOPS bandwidth=800GB/s"


def test_a_device_is_described_in_text():
    found = ClusterSpec.parse(
        f"2x8x{NPU} link=300GB/s nic=400Gb/s host=25GB/s host_memory=64GiB watts=300W measured=90TFLOPS"
    )
    spec = found.device
    assert (str(found), found.num_devices, spec.peak_flops("bf16"), spec.measured_flops) == (
        "2x8xnpu",
        16,
        120e12,
        90e12,
    )
    assert (spec.memory_bytes, spec.memory_bytes_per_s, spec.watts) == (24 * 2**30, 800e9, 300)
    assert (spec.scale_up_bytes_per_s, spec.scale_up_domain, spec.nic_bytes_per_s) == (300e9, 8, 50e9)
    assert (spec.host_bytes_per_s, spec.host_memory_bytes) == (25e9, 64 * 2**30)
    assert device(NPU) == device(f"{NPU[:-4]} GB/s") == device("NPU memory = 24 GiB bf16=120TFLOP/s bandwidth=0.8TB/s")
    table = {"devices_per_node": 8, "device": f"{NPU} link=300GB/s"}
    assert ClusterSpec.from_mapping(table) == ClusterSpec.parse(f"8x{NPU} link=300GB/s")
    units = {"name": "npu", "tflops": {"bf16": "120TFLOPS"}, "memory_gib": "24GiB", "memory_gb_s": "800GB/s"}
    assert ClusterSpec.from_mapping({"devices_per_node": 1, "device": units}).device == device(NPU)
    assert ClusterSpec.parse(f"64x{NPU} domain=8 link=1GB/s").nodes == 8


def test_a_description_changes_a_known_device():
    found = ClusterSpec.parse("8xh100 memory=96GiB").device
    assert (
        found == ClusterSpec.from_mapping({"devices_per_node": 8, "device": {"like": "h100", "memory_gib": 96}}).device
    )
    capped = ClusterSpec.from_mapping({"devices_per_node": 8, "device": {"like": "h100", "watts": 500}}).device
    assert device("h100 watts=500") == capped
    assert device("mine like=h100 memory=96GiB").name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "npu memory=24GiB",
            "device=npu: a device that is not built in needs memory=, bandwidth= and a peak such as bf16=",
        ),
        ("npu memory=24 bf16=1TFLOPS bandwidth=1GB/s", r"memory=24: .*with its unit is needed. Use e.g. memory=24GiB."),
        (NPU.replace("800GB/s", "800gb/s"), r"bandwidth=800gb/s: .*Use e.g. bandwidth=800GB/s."),
        (NPU.replace("120TFLOPS", "120"), r"bf16=120: a dense peak with its unit is needed. Use e.g. bf16=120TFLOPS."),
        (f"{NPU} memry=3GiB", "memry=3GiB: unknown field. Did you mean 'memory'"),
        (f"{NPU} memory=3GiB", "npu memory=3GiB: it is repeated"),
        (f"{NPU} fast", "npu fast: not name=value"),
        (f"{NPU} link=0GB/s", "link=0GB/s: a number above 0"),
        (f"{NPU} domain=2.5", "domain=2.5: a whole number above 0"),
        (f"{NPU} topology=ring", "scale_up_topology=ring: not one of switch"),
        (f"{NPU} like=h1oo", "device=h1oo: unknown device"),
        ("memory=24GiB bf16=1TFLOPS", "a description begins with a name"),
    ],
)
def test_bad_descriptions_are_refused_in_one_sentence(text, message):
    for source in (text, f"8x{text}"):
        with pytest.raises(ConfigError, match=message):
            ClusterSpec.parse(source)


def test_described_clusters():
    assert described_clusters(NPU, "2x8xnpu") == f"2x8x{NPU}"
    assert described_clusters(NPU, None) == NPU
    assert described_clusters(NPU, "8xNPU,8xh100") == f"8x{NPU},8xh100"
    with pytest.raises(ConfigError, match=r"cluster=8xh100: --device describes npu\. Write e\.g\. '8xnpu'"):
        described_clusters(NPU, "8xh100")


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("T4", "t4", 16), ("l4-24gb", "l4", 24), ("a10", "a10", 24), ("a10g-24gb", "a10g", 24),
        ("rtx a6000", "a6000", 48), ("l40s", "l40s", 48), ("3090", "rtx3090", 24), ("RTX 5090", "rtx5090", 32),
        ("rtx pro 6000", "rtxpro6000", 96),
        ("mi350x", "mi350x", 288), ("v5e", "tpu-v5e", 16), ("v5p", "tpu-v5p", 95), ("v6e", "tpu-v6e", 32),
        ("M4 Max", "m4-max", 128), ("apple-m2-ultra", "m2-ultra", 192), ("m1", "m1", 16),
    ],
)  # fmt: skip
def test_everyday_devices_are_known(text, name, gib):
    spec = device(text)
    assert (spec.name, spec.memory_bytes) == (name, gib * 2**30)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("v5p-16", "8xtpu-v5p"), ("v4-8", "4xtpu-v4"), ("V5e-16", "16xtpu-v5e"), ("v5litepod-16", "16xtpu-v5e"),
        ("v6e-16", "16xtpu-v6e"), ("2xv5p-16", "2x8xtpu-v5p"),
    ],
)  # fmt: skip
def test_tpu_slices_have_googles_names(text, cluster):
    """v4 and v5p count TensorCores, two of a chip; v5e and v6e count chips."""
    assert str(ClusterSpec.parse(text)) == cluster


def test_tpu_slices_have_whole_chips():
    with pytest.raises(ConfigError, match="device=v5p-15: unknown device"):
        ClusterSpec.parse("v5p-15")


def test_arrangements_have_all_chips_of_a_slice():
    for name, shapes in ARRANGEMENTS.items():
        assert name in devices()
        for chips, shape in shapes.items():
            assert math.prod(map(int, shape.split("x"))) == chips
            assert ClusterSpec.parse(slice_name(name, chips)).num_devices == chips


def test_this_machines_cpu():
    one, four = (ClusterSpec.parse(text) for text in ("cpu", "4xcpu"))
    assert (str(one), str(four), four.num_devices) == ("1xcpu", "4xcpu", 4)
    assert 0 < four.device.memory_bytes <= one.device.memory_bytes
    assert 0 < four.device.peak_flops("fp32") <= one.device.peak_flops("fp32")
    assert one.device.is_cpu
    assert one.device.pinnable_bytes == 0  # it has no other memory to offload to

"""The hardware table: which name finds which peak, and what finds none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ergmeter import hardware
from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.hardware import DeviceSpec, cpu_peak, cpu_peak_of, lookup, parse_peak
from ergmeter.records import DTYPES
from ergmeter.views import hardware as view

ROOT = Path(__file__).parents[2]
T = 1e12
ROWS = hardware.built_in_devices()


@pytest.fixture(autouse=True)
def no_rows_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ERGMETER_HARDWARE", raising=False)


# As drivers print them. The figure is that of the 16-bit type training uses: bf16, or fp16 where
# the device has no bf16.
DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L4": 121,
    "NVIDIA L20": 119.5,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H800": 989.5,
    "NVIDIA H800 PCIe": 756.5,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA GH200 144G HBM3e": 989.5,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    "Quadro RTX 8000": 130.5,
    "Quadro RTX 6000": 130.5,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX A4000": 76.7,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 440,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 480,
    "NVIDIA GeForce RTX 2080 Ti": 53.8,
    "NVIDIA GeForce RTX 3090": 71.16,
    "GeForce RTX 3090": 71.16,
    "NVIDIA GeForce RTX 4090": 165.16,
    "NVIDIA GeForce RTX 4090 D": 147.08,
    "NVIDIA GeForce RTX 4080": 97.48,
    "NVIDIA GeForce RTX 5090": 209.6,
    "NVIDIA GeForce RTX 5080": 112.56,
    "AMD Instinct MI210": 181,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI250": 181.05,
    "AMD Instinct MI300A": 980.6,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI300X OAM": 1307.4,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI355X": 2516.6,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU7x": 1153.5,
    "trainium2": 667,
    "inferentia2": 190,
    "GAUDI2": 432,
    "GAUDI3": 1835,
}


@pytest.mark.parametrize(("name", "peak_tflop_per_s"), DRIVER_NAMES.items())
def test_a_drivers_name_finds_its_own_peak(name: str, peak_tflop_per_s: float) -> None:
    spec = lookup(name)
    assert name in spec.driver_names
    dtype = "bf16" if "bf16" in spec.peak_flops_per_s else "fp16"
    assert spec.peak(dtype) == pytest.approx(peak_tflop_per_s * T, rel=1e-3)


@pytest.mark.parametrize(
    ("alias", "key", "peak_tflop_per_s"),
    [
        ("h100-sxm", "h100-sxm", 989.5),
        ("h100-pcie", "h100-pcie", 756.5),
        ("tpu-v5p", "tpu-v5p", 459),
        ("trn1-core", "trn1-core", 95),
        ("trn2-chip", "trn2-chip", 667),
        ("trn3-chip", "trn3-chip", 671),
        ("rtx 4090", "rtx-4090", 165.16),
        ("mi250x", "mi250x-gcd", 191.5),
    ],
)
def test_an_alias_finds_its_row(alias: str, key: str, peak_tflop_per_s: float) -> None:
    assert lookup(alias).key == key
    assert lookup(alias).peak("bf16") == pytest.approx(peak_tflop_per_s * T, rel=1e-3)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("H100 SXM", "h100-sxm"),
        ("H100 SXM5", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("H100 NVL", "h100-nvl"),
        ("H200 SXM", "h200-sxm"),
        ("H200 NVL", "h200-nvl"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100 SXM4 80GB", "a100-sxm-80gb"),
        ("L40S", "l40s"),
        ("RTX A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("DGX Spark", "gb10"),
        ("MI300X", "mi300x"),
        ("Instinct MI300X", "mi300x"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("Trainium2", "trn2-chip"),  # what neuron-monitor calls the chip
        ("Trainium2 core", "trn2-core"),
        ("Gaudi 3", "gaudi3"),
    ],
)
def test_a_device_is_found_as_people_call_it(said: str, key: str) -> None:
    assert lookup(said).key == key


def test_what_a_datasheet_does_not_settle_is_left_out() -> None:
    assert set(lookup("RTX 4000 Ada").peak_flops_per_s) == {"fp32"}


def test_case_and_runs_of_spaces_do_not_matter_and_nothing_else_is_forgiven() -> None:
    assert lookup("  nvidia h100   80gb HBM3 ").key == "h100-sxm"
    for name in ("NVIDIA-H100-80GB-HBM3", "H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(NotMeasurable, match="unknown peak: pass --peak"):
            lookup(name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("NVIDIA L40S", "NVIDIA L4"),
        ("NVIDIA L40S", "NVIDIA L40"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"),
        ("NVIDIA A10", "NVIDIA A10G"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"),
        ("NVIDIA B200", "NVIDIA GB200"),
    ],
)
def test_near_names_are_told_apart(one: str, other: str) -> None:
    first, second = lookup(one), lookup(other)
    assert first.key != second.key
    assert first.peak("bf16") != second.peak("bf16")


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L41", "Graphics Device", "a", ""]
)
def test_an_unknown_name_has_no_peak_and_says_what_to_pass(name: str) -> None:
    with pytest.raises(NotMeasurable, match=r"^unknown peak: pass --peak \(no row") as said:
        lookup(name)
    assert "\n" not in str(said.value)


def test_a_similar_name_is_asked_about_not_used() -> None:
    with pytest.raises(NotMeasurable, match=r"Did you mean 'NVIDIA L40S'"):
        lookup("NVIDIA L40SX")


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("h100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("AMD Instinct MI250X / MI250", ["mi250x-gcd", "mi250-gcd"]),
        ("NVIDIA GeForce RTX 3080", ["rtx-3080-10gb", "rtx-3080-12gb"]),
        ("trn2", ["trn2-core", "trn2-chip"]),
        ("A100 80GB", ["a100-sxm-80gb", "a100-pcie-80gb"]),
        ("NVIDIA H100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("NVIDIA GeForce RTX 2060", ["rtx-2060-6gb", "rtx-2060-12gb"]),
        ("AWS Trainium2", ["trn2-core", "trn2-chip"]),
        ("Trainium3", ["trn3-core", "trn3-chip"]),
        ("Apple M2 Max", ["apple-m2-max-30", "apple-m2-max-38"]),
    ],
)
def test_a_name_of_several_devices_is_answered_with_them(name: str, candidates: list[str]) -> None:
    with pytest.raises(NotMeasurable, match="unknown peak: pass --peak") as said:
        lookup(name)
    assert ", ".join(candidates) in str(said.value)


def test_no_name_belongs_to_two_rows_or_is_also_ambiguous() -> None:
    names = [
        (" ".join(name.split()).casefold(), spec.key)
        for spec in ROWS
        for name in {spec.key, spec.name, *spec.driver_names, *spec.aliases}
    ]
    owners: dict[str, set[str]] = {}
    for name, key in names:
        owners.setdefault(name, set()).add(key)
    assert {name: keys for name, keys in owners.items() if len(keys) > 1} == {}
    ambiguous = hardware.ambiguous_names()
    assert set(ambiguous).isdisjoint(owners)
    keys = {spec.key for spec in ROWS}
    assert all(len(among) > 1 and set(among) <= keys for among in ambiguous.values())


def test_there_are_rows_for_every_family() -> None:
    assert len(ROWS) >= 60
    assert {spec.vendor for spec in ROWS} == {"nvidia", "amd", "google", "aws", "intel", "apple"}


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.key)
def test_a_row_is_whole(spec: DeviceSpec) -> None:
    assert spec.source
    assert spec.note
    assert re.fullmatch(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", spec.checked)
    assert set(spec.peak_flops_per_s) <= set(DTYPES)
    assert spec.origin == hardware.BUILT_IN
    if spec.vendor != "apple":
        assert spec.peak_flops_per_s
        assert spec.bandwidth_bytes_per_s or spec.key in ("rtx-pro-6000-server", "b300")


@pytest.mark.parametrize("key", ["h100-sxm", "h100-pcie", "h100-nvl", "h200-sxm", "h20-96gb"])
def test_figures_are_dense(key: str) -> None:
    spec = lookup(key)
    assert spec.peak("fp8") == pytest.approx(2 * spec.peak("bf16"), rel=1e-3)
    assert spec.peak("tf32") == pytest.approx(spec.peak("bf16") / 2, rel=1e-3)


def test_more_precise_is_never_faster() -> None:
    for spec in ROWS:
        rates = [spec.peak_flops_per_s.get(d) for d in ("fp32", "tf32", "bf16", "fp8", "fp4")]
        known = [rate for rate in rates if rate is not None]
        assert known == sorted(known), spec.key


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Tesla T4", "bf16"), ("Tesla V100-SXM2-16GB", "bf16"), ("NVIDIA A100-SXM4-80GB", "fp8")],
)
def test_a_type_the_device_lacks_has_no_peak(name: str, dtype: str) -> None:
    with pytest.raises(NotMeasurable, match=f"pass --peak .* has no {dtype} rate"):
        lookup(name).peak(dtype)


def test_a_type_there_is_not_is_misuse() -> None:
    with pytest.raises(UsageError, match="no type 'bfloat16'; the table has fp32"):
        lookup("h100-sxm").peak("bfloat16")


@pytest.mark.parametrize(("stem", "cores"), [("trn1", 2), ("inf2", 2), ("trn2", 8), ("trn3", 8)])
def test_the_cores_of_a_chip_add_up_to_it(stem: str, cores: int) -> None:
    core, chip = lookup(f"{stem}-core"), lookup(f"{stem}-chip")
    for dtype, peak in chip.peak_flops_per_s.items():
        assert core.peak(dtype) * cores == pytest.approx(peak)


def test_bandwidth_memory_and_power_are_in_base_units() -> None:
    spec = lookup("NVIDIA H200")
    assert spec.bandwidth_bytes_per_s == 4.8e12
    assert spec.memory_bytes == 141 * 2**30
    assert spec.tdp_w == 700


OWN = """
[acme-9000]
name = "ACME 9000"
driver_names = ["ACME Accelerator 9000"]
peak_tflop_per_s = { bf16 = 400, fp8 = 800.5 }
source = "ACME 9000 datasheet"
"""


def own_rows(path: Path, text: str = OWN) -> Path:
    path.write_text(text)
    return path


def test_a_users_row_is_found_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml")
    spec = lookup("acme accelerator 9000", extra=path)
    assert (spec.peak("bf16"), spec.peak("fp8")) == (400 * T, 800.5 * T)
    assert (spec.origin, spec.note) == (str(path), f"row of {path}")
    assert spec.memory_bytes is None


def test_a_users_file_is_found_by_its_place_and_by_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ".config" / "ergmeter"
    place.mkdir(parents=True)
    own_rows(place / "hardware.toml")
    assert lookup("acme-9000").peak("bf16") == 400 * T
    other = own_rows(tmp_path / "other.toml", OWN.replace("bf16 = 400", "bf16 = 500"))
    monkeypatch.setenv("ERGMETER_HARDWARE", str(other))
    assert lookup("acme-9000").peak("bf16") == 500 * T
    monkeypatch.setenv("ERGMETER_HARDWARE", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"ERGMETER_HARDWARE names .*none.toml"):
        lookup("acme-9000")


@pytest.mark.parametrize(
    "text",
    [
        OWN.replace("ACME Accelerator 9000", "NVIDIA H200"),
        OWN.replace("acme-9000", "h200-sxm"),
    ],
    ids=["by driver name", "by key"],
)
def test_a_users_row_wins_over_the_built_in_one_and_says_so(tmp_path: Path, text: str) -> None:
    spec = lookup("NVIDIA H200", extra=own_rows(tmp_path / "own.toml", text))
    assert spec.peak("bf16") == 400 * T
    assert "in place of the built-in h200-sxm" in spec.note
    assert lookup("NVIDIA H200").peak("bf16") == 989.5 * T


def test_a_users_row_can_settle_a_name_of_several(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN.replace("acme-9000", "h100"))
    assert lookup("h100", extra=path).peak("bf16") == 400 * T


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("bf16 = 400", "bf16 = -4"), r"\[acme-9000\] peak_tflop_per_s.bf16 is -4; a number above"),
        (("bf16 = 400", "bf16 = '400'"), r"peak_tflop_per_s.bf16 is '400'; a number is needed"),
        (("bf16 = 400", "bf16 = nan"), r"peak_tflop_per_s.bf16 is nan; a number above 0"),
        (("bf16 = 400", "bf16 = 400e12"), r"bf16 is 400000000000000.0; that many TFLOP/s"),
        (("bf16 = 400", "bfloat16 = 400"), r"peak_tflop_per_s has no type 'bfloat16'; it may"),
        (("name =", "nam ="), r"\[acme-9000\] has no field 'nam'; it may have name, vendor"),
        (('name = "ACME 9000"', ""), r"\[acme-9000\] name is missing; a row needs"),
        (('source = "ACME 9000 datasheet"', ""), r"\[acme-9000\] source is missing"),
        (('"ACME 9000 datasheet"', '""'), r"source is empty; a text is needed"),
        (('["ACME Accelerator 9000"]', '"ACME"'), r"driver_names is 'ACME'; a list of texts"),
        (('["ACME Accelerator 9000"]', "[9000]"), r"driver_names is \[9000\]; a list of texts"),
        (("[acme-9000]", "checked = 3\n[acme-9000]"), r"checked = 3 stands outside a row"),
        (("[acme-9000]", "[acme-9000"), r"is not TOML: "),
    ],
)
def test_a_fault_in_a_users_file_is_one_line_with_its_place(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = own_rows(tmp_path / "own.toml", OWN.replace(*change))
    with pytest.raises(FormatError, match=said) as error:
        lookup("NVIDIA H200", extra=path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_name_in_two_rows_of_a_file_is_a_fault(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN + OWN.replace("[acme-9000]", "[acme-9001]"))
    with pytest.raises(FormatError, match=r"\[acme-9001\] and \[acme-9000\] both claim 'acme"):
        lookup("NVIDIA H200", extra=path)


@pytest.mark.parametrize(
    ("text", "flops_per_s"),
    [
        ("989.5e12", 989.5e12),
        ("989.5T", 989.5e12),
        ("989.5 TFLOP/s", 989.5e12),
        ("989.5 tflops", 989.5e12),
        ("2.25 PFLOP/s", 2.25e15),
        ("800G", 800e9),
        (" 312 TFLOPs ", 312e12),
        ("624 TOPS", 624e12),
        (".5P", 0.5e15),
    ],
)
def test_a_peak_is_read_as_people_write_it(text: str, flops_per_s: float) -> None:
    assert parse_peak(text) == pytest.approx(flops_per_s)


@pytest.mark.parametrize("text", ["", "fast", "-3T", "nan", "inf", "1e", "12 TB/s", "3 T T", "12M"])
def test_what_is_no_peak_is_misuse(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no peak; write it as 989\.5e12"):
        parse_peak(text)


@pytest.mark.parametrize("text", ["989.5", "0", "0T", "989.5e27", "1e400"])
def test_a_peak_in_the_wrong_unit_is_asked_about(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no device's; is the unit missing, as in 989.5T"):
        parse_peak(text)


def test_a_cpus_peak_is_the_product_of_its_parts_and_is_assumed() -> None:
    spec = cpu_peak(32, clock_hz=2.5e9, fp32_lanes=16, fma_units=2)
    assert spec.peak("fp32") == 32 * 16 * 2 * 2 * 2.5e9
    assert spec.basis == "assumed"
    assert "32 cores x 16 fp32 lanes x 2 FMA units x 2 FLOP x 2.50 GHz" in spec.source
    with pytest.raises(NotMeasurable):
        spec.peak("bf16")
    with pytest.raises(UsageError):
        cpu_peak(0, clock_hz=2.5e9, fp32_lanes=16, fma_units=2)


def cpuinfo(*threads: tuple[int, int], vendor: str = "GenuineIntel", **more: str) -> str:
    """Hardware threads by their socket and core, as Linux lists them."""
    blocks = []
    for number, (socket, core) in enumerate(threads):
        fields = {"processor": number, "vendor_id": vendor, "cpu MHz": f"{2000 + number}.000"}
        fields |= {"physical id": socket, "core id": core, **more}
        blocks.append("\n".join(f"{name}\t: {value}" for name, value in fields.items()))
    return "\n\n".join(blocks) + "\n\n"


def test_two_threads_of_a_core_count_once_and_amx_has_its_own_rate() -> None:
    text = cpuinfo((0, 0), (0, 1), (0, 0), (0, 1), flags="fpu avx2 fma avx512f amx_bf16 amx_int8")
    spec = cpu_peak_of(text, clock_hz=3e9)
    assert spec.peak("fp32") == 2 * 16 * 2 * 2 * 3e9
    assert spec.peak("bf16") == 2 * 1024 * 3e9
    assert spec.peak("int8") == 2 * 2048 * 3e9
    assert "3.00 GHz, the highest it allows" in spec.note


def test_without_a_clock_the_one_of_the_moment_is_taken_and_named() -> None:
    spec = cpu_peak_of(cpuinfo((0, 0), (0, 1), flags="avx2 fma"))
    assert spec.peak("fp32") == 2 * 8 * 2 * 2 * 2.001e9
    assert "2.00 GHz, as read now" in spec.note


def test_zen_4_runs_512_bits_in_halves() -> None:
    zen4 = {"vendor": "AuthenticAMD", "flags": "avx2 fma avx512f"}
    assert cpu_peak_of(cpuinfo((0, 0), **zen4, **{"cpu family": "25"}), clock_hz=1e9).peak(
        "fp32"
    ) == pytest.approx(32e9)
    assert cpu_peak_of(cpuinfo((0, 0), **zen4, **{"cpu family": "26"}), clock_hz=1e9).peak(
        "fp32"
    ) == pytest.approx(64e9)


GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"


def test_an_arm_core_is_known_by_its_part_or_not_at_all() -> None:
    assert cpu_peak_of(GRACE, clock_hz=3e9).peak("fp32") == 4 * 4 * 2 * 3e9
    with pytest.raises(NotMeasurable, match="clock is not known"):
        cpu_peak_of(GRACE)
    with pytest.raises(NotMeasurable, match="vector width"):
        cpu_peak_of(GRACE.replace("0xd4f", "0xfff"), clock_hz=3e9)


def test_a_cpu_that_says_nothing_has_no_peak() -> None:
    with pytest.raises(NotMeasurable, match="names no processor"):
        cpu_peak_of("")
    with pytest.raises(NotMeasurable, match="vector width"):
        cpu_peak_of(cpuinfo((0, 0), flags="fpu sse2"))


def test_the_hardware_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "hardware.md").read_text() == view.page(), "run ./dev docs"

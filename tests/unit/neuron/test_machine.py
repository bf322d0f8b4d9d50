"""Cores and their peak, against AWS's figures for whole instances."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.neuron.mfu import Machine, machine


def of(name: str, *, devices: int | None = None, lnc: int | None = None, nodes: int = 1) -> Machine:
    return machine(
        name, nodes=nodes, devices=devices, lnc=lnc, dtype="bf16", devices_from="--devices"
    )


@pytest.mark.parametrize(
    ("name", "devices", "lnc", "cores", "node_tflop_per_s"),
    [
        ("trn1", 32, None, 32, 3040),  # trn1.32xlarge, AWS: 3,040 TFLOPS
        ("trn1", 2, None, 2, 190),  # trn1.2xlarge: 190
        ("trn2", 64, None, 128, 10672),  # trn2.48xlarge, 16 chips of 667, LNC=2
        ("trn2", 128, None, 128, 10672),  # the same with LNC=1
        ("trn2", 4, 1, 4, 333.5),
        ("trn3", 8, 2, 16, 1342),  # two chips of 671
        ("inf2", 24, None, 24, 2280),  # inf2.48xlarge: 12 chips of 190
    ],
)
def test_the_peak_is_that_of_the_cores_that_were_used(
    name: str, devices: int, lnc: int | None, cores: int, node_tflop_per_s: float
) -> None:
    found = of(name, devices=devices, lnc=lnc, nodes=3)
    assert (found.cores_per_node, found.cores) == (cores, 3 * cores)
    assert cores * found.core_flops_per_s == pytest.approx(node_tflop_per_s * 1e12)


def test_without_devices_a_whole_instance_is_assumed_and_said() -> None:
    found = of("trn2")
    assert (found.devices_per_node, found.cores_per_node) == (64, 128)
    assert "all 128 cores of trn2.48xlarge are assumed" in found.notes[0]


def test_where_no_instance_is_published_nothing_is_assumed() -> None:
    assert of("trn3").cores is None


def test_more_devices_than_an_instance_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"64 devices .* more than the 32 cores of trn1.32xlarge"):
        of("trn1", devices=64)
    with pytest.raises(UsageError, match="trn1 supports --lnc 1 only"):
        of("trn1", devices=16, lnc=2)


def test_how_logical_cores_were_taken_is_said() -> None:
    assert "LNC=2, the default of trn2" in of("trn2", devices=64).notes[0]
    assert "LNC=1 is taken" in of("trn2", devices=128).notes[0]
    assert of("trn2", devices=64, lnc=2).notes == ()

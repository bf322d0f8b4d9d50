"""The cores a job ran on, and their peak FLOP/s.

The peak is that of the cores used, not of the instance: a job on one chip of sixteen would
otherwise read sixteen times too low. "Devices" are what the trainer counts. On Trainium2 and 3 that
is a logical core, by default two physical ones (LNC=2), so 64 devices are the 128 cores of a
trn2.48xlarge.
"""

from __future__ import annotations

from dataclasses import dataclass

from ergmeter.errors import UsageError
from ergmeter.hardware import lookup


@dataclass(frozen=True, slots=True)
class Backend:
    """A family of instances. Sizes: AWS Neuron documentation, instance and chip architecture."""

    name: str
    cores_per_chip: int
    largest: str  # the largest instance of the family
    cores_in_largest: int | None  # physical; None: not published as one instance
    cores_per_device: int  # physical cores in what a trainer calls a device, if nothing is said


BACKENDS = {
    "trn1": Backend("trn1", 2, "trn1.32xlarge", 32, 1),
    "trn2": Backend("trn2", 8, "trn2.48xlarge", 128, 2),
    "trn3": Backend("trn3", 8, "a Trn3 UltraServer", None, 2),
    "inf2": Backend("inf2", 2, "inf2.48xlarge", 24, 1),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores of a job and their dense peak."""

    backend: str
    nodes: int
    devices_per_node: int | None  # as the trainer counts them; None: not known
    cores_per_node: int | None  # physical
    dtype: str
    core_flops_per_s: float
    chip_flops_per_s: float
    source: str
    notes: tuple[str, ...]

    @property
    def cores(self) -> int | None:
        """Physical cores of all nodes."""
        return None if self.cores_per_node is None else self.cores_per_node * self.nodes


def machine(
    name: str, *, nodes: int, devices: int | None, lnc: int | None, dtype: str, devices_from: str
) -> Machine:
    """The machine of a job. `devices`: per node, as the trainer counts; None: not given."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise UsageError(f"no hardware backend {name!r}; there are {', '.join(BACKENDS)}")
    core, chip = lookup(f"{name}-core"), lookup(f"{name}-chip")
    notes: list[str] = []
    grouped = _cores_per_device(backend, devices, lnc, notes)
    cores = None if devices is None else devices * grouped
    most = backend.cores_in_largest
    if devices is None and most is not None:
        cores, devices = most, most // grouped
        notes.append(
            f"devices per node are not given: all {most} cores of {backend.largest} are assumed;"
            " pass --devices, or put trainer.devices into the YAML"
        )
    if cores is not None and most is not None and cores > most:
        raise UsageError(
            f"{devices} devices of {grouped} core{'s' if grouped > 1 else ''} a node"
            f" ({devices_from}) are more than the {most} cores of {backend.largest};"
            f" is it another --hw-backend{', or --lnc 1' if grouped > 1 else ''}?"
        )
    return Machine(
        backend=name,
        nodes=nodes,
        devices_per_node=devices,
        cores_per_node=cores,
        dtype=dtype,
        core_flops_per_s=core.peak(dtype),
        chip_flops_per_s=chip.peak(dtype),
        source=f"{core.source}, checked {core.checked}; {core.note}",
        notes=tuple(notes),
    )


def _cores_per_device(
    backend: Backend, devices: int | None, lnc: int | None, notes: list[str]
) -> int:
    """Physical cores in a device: LNC where it is given, else the backend's own default."""
    if lnc is not None:
        if backend.cores_per_device == 1 and lnc != 1:
            raise UsageError(f"{backend.name} knows --lnc 1 alone; got {lnc}")
        return lnc
    default, most = backend.cores_per_device, backend.cores_in_largest
    if default > 1 and devices is not None:
        if most is not None and devices * default > most:
            notes.append(
                f"{devices} devices a node are more than {backend.largest} has with LNC={default},"
                " so LNC=1 is taken: a device is one physical core"
            )
            return 1
        notes.append(
            f"a device is taken as {default} physical cores (LNC={default}, the default of"
            f" {backend.name}); pass --lnc 1 if it was one"
        )
    return default

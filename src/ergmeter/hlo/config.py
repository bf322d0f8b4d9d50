"""What does an instruction's backend config say: a loop's trip count, a library call's dimensions,
an NKI kernel's MACs?

The trap: three answers look alike. A kernel that says 0 MACs (a norm) is known; one without the key
is not; one whose config can't be read is not either, for another reason. None of the last two
is a 0.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ergmeter.hlo.module import BACKEND_CONFIG, BACKEND_CONFIG_PAYLOAD, CUSTOM_CALL_TARGET
from ergmeter.hlo.wire import integer, span

if TYPE_CHECKING:
    from ergmeter.hlo.module import Instruction, Module

KERNEL_TARGETS = ("AwsNeuronCustomNativeKernel", "AwsNeuronNkiKernel")
# NKI writes the first, which AWS's own scoring scripts read; an older compiler the second.
_MAC_KEYS = ("mac_count", "matmul_mac_count")
_MAX_BYTES = 1 << 26

State = Literal["known", "absent", "unreadable"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An NKI kernel in a module: how often it runs, and the MACs of one call as it states them."""

    function: str | None
    target: str
    state: State
    calls: int
    macs_per_call: int | None


def backend_config(module: Module, instruction: Instruction) -> bytes:
    """The config's bytes, from wherever this version of XLA puts them."""
    data, place = instruction.data, span(instruction.fields, BACKEND_CONFIG)
    payload = instruction.part(BACKEND_CONFIG_PAYLOAD)
    if payload and not (place and place[1] > place[0]):
        place = span(payload, 1)
        number = integer(payload, 2)
        if place is None and 0 <= number < len(module.payloads):
            place, data = module.payloads[number], module.data
    if not place or place[1] - place[0] > _MAX_BYTES:
        return b""
    return data[place[0] : place[1]]


def as_json(config: bytes) -> dict[str, Any]:
    """The config as XLA's CPU and GPU backends write it; empty where it is not that."""
    try:
        found = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def known_trip_count(config: bytes) -> int | None:
    """How often a loop runs, where the compiler has written it down; it writes it as a string."""
    found = as_json(config).get("known_trip_count")
    return whole_number(found.get("n")) if isinstance(found, dict) else None


def whole_number(value: object) -> int | None:
    """A count that is written as a number or as a string of digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 100:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def kernel(module: Module, call: Instruction) -> Kernel:
    """What the config of an NKI kernel says of one call."""
    function, state, macs = _kernel(backend_config(module, call))
    return Kernel(function, call.text(CUSTOM_CALL_TARGET), state, 1, macs)


@lru_cache(maxsize=64)
def _kernel(config: bytes) -> tuple[str | None, State, int | None]:
    try:
        plain = config if config.lstrip()[:1] == b"{" else _unpacked(config)
        found = json.loads(plain)
    except (ValueError, RecursionError):
        return None, "unreadable", None
    if not isinstance(found, dict):
        return None, "unreadable", None
    name = found.get("func_name")
    function = name if isinstance(name, str) else None
    for key in _MAC_KEYS:
        if key in found:
            macs = whole_number(found[key])
            return function, "unreadable" if macs is None else "known", macs
    return function, "absent", None


def _unpacked(config: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(config.split()), validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error

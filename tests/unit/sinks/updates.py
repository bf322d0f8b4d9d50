"""Three updates and a final one, as a feed makes them: what every sink is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ergmeter.ports import SinkRequest, Update
from ergmeter.records import Missing, Reading, Result, Summary, Window

GPU = "GPU-5b1c/0:a"  # signs that a tracker would refuse in a name
RUN = "llama sft"
NO_GRID = "no grid intensity: give grid_g_per_kwh"
Returned = TypeVar("Returned")


def update(step: int, *, scale: float = 1.0, is_final: bool = False, **changed: Result) -> Update:
    """An update at a step. `scale` moves the values, so that no two updates have the same."""
    readings: dict[str, Result] = {
        "throughput.tokens_per_s": Reading(12345.6789 * scale, "tokens/s", "measured"),
        "tokens.total": Reading(40960.0 * step, "tokens", "measured"),
        "time.step_s": Reading(0.331 * scale, "s", "measured", low=0.3, high=0.4),
        "energy.run_j": Reading(3141.5926 * scale, "J", "measured"),
        "energy.mean_w": Reading(310.25 * scale, "W", "measured"),
        "energy.joules_per_token": Reading(0.0251 * scale, "J/token", "derived", note="real"),
        "memory.device_peak_bytes": Reading(12.5e9 * scale, "B", "measured"),
        "utilization.busy_frac": Reading(0.97, "frac", "measured"),
        "utilization.mfu_frac": Reading(0.4123456789 * scale, "frac", "assumed"),
        "carbon.co2e_g": Missing(NO_GRID),
    }
    # Keyword arguments have no dots.
    readings.update({key.replace("__", "."): result for key, result in changed.items()})
    devices: dict[str, dict[str, Result]] = {
        GPU: {
            "energy.mean_w": Reading(309.75 * scale, "W", "measured"),
            "memory.device_mean_bytes": Reading(11.5e9 * scale, "B", "measured"),
            "utilization.busy_frac": Missing("the driver does not say"),
        },
        "cpu-0": {"energy.mean_w": Reading(80.125 * scale, "W", "measured")},
    }
    window = Window(1 if is_final else step * 10**9, step * 10**9 + 10 * 10**9)
    summary = Summary(RUN, "running", readings, devices, ("a note",))
    return Update(step, 1_800_000_000.25 + step, window, summary, is_final)


UPDATES = (
    update(10),
    update(20, scale=1.1),
    update(30, scale=0.7),
    update(30, scale=0.9, is_final=True),
)


def request(run: object, **options: Any) -> SinkRequest:
    return SinkRequest(str(run), RUN, options)


def on_a_thread(action: Callable[[], Returned]) -> Returned:
    """What the feed does: everything of a sink happens on one thread, which is not the main one."""
    outcome: list[Returned] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(action())
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def written(sink: Any, *updates: Update) -> Any:
    """The sink with these updates written, and closed."""
    for one in updates:
        sink.write(one)
    sink.close()
    return sink

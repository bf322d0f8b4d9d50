"""The work of a step as a table, as JSON, and the conventions as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from ergmeter.flops.analytic import total
from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.records import Missing
from ergmeter.units import scaled, significant
from ergmeter.views.documents import result

if TYPE_CHECKING:
    from ergmeter.flops.analytic import PartFlops
    from ergmeter.flops.work import Work
    from ergmeter.records import Result


def parts_table(work: Work, *, tokens: int) -> Table:
    """What each part of the model costs in a step."""
    sums = total(work.parts)
    step, token = _scale(sums.model), _scale(sums.model / tokens)
    title = f"a step of {tokens} tokens, in {step[1]}FLOP; per token in {token[1]}FLOP"
    table = _table(title + ("; extra: again, or on padding" if sums.recomputed else ""))
    table.add_column("part", no_wrap=True)
    columns = ["forward", *(["backward"] if sums.backward else [])]
    columns += ["extra"] if sums.recomputed else []
    for name in (*columns, "share", "per token"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, flops in [*work.parts.items(), ("all", sums)]:
        if not flops.hardware:
            continue
        values = {"forward": flops.forward, "backward": flops.backward, "extra": flops.recomputed}
        table.add_row(
            part,
            *(_number(values[name], step) for name in columns),
            f"{100 * flops.model / sums.model:.1f} %",
            _number(flops.model / tokens, token),
            style="bold" if part == "all" else "",
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )


def _scale(value: float) -> tuple[float, str]:
    """The factor and the prefix that a whole table is printed in."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return factor, prefix
    return 1.0, ""


def _number(value: float, scale: tuple[float, str]) -> str:
    return significant(value / scale[0]) if value else "-"


def conventions_table(work: Work) -> Table:
    """The step under each convention, and how far each is from the chosen one."""
    chosen = work.chosen
    tokens = chosen.tokens_per_step or 1
    step, token = _scale(chosen.model_per_step), _scale(chosen.model_per_step / tokens)
    table = _table(f"under each convention, in {step[1]}FLOP; per token in {token[1]}FLOP")
    table.add_column("convention", no_wrap=True)
    for name in ("a step", "per token", "against it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("formula per token", style="dim")
    for name, flops in work.flops.items():
        off = flops.model_per_step / chosen.model_per_step - 1
        table.add_row(
            name,
            _number(flops.model_per_step, step),
            _number(flops.model_per_step / tokens, token),
            "chosen" if flops is chosen else f"{100 * off:+.1f} %",
            CONVENTIONS[name].formula,
        )
    return table


def lines(work: Work) -> list[Text]:
    """What stands around the tables."""
    said = [f"{_count(work.params)} parameters"]
    if work.params_active != work.params:
        said.append(f"{_count(work.params_active)} met by a token")
    if work.params_trained != work.params:
        share = 100 * work.params_trained / work.params
        said.append(f"{_count(work.params_trained)} trained ({significant(share, 3)} %)")
    found = [Text(", ".join(said))]
    traffic = work.traffic
    if traffic is not None:
        found.append(
            Text(
                f"must move {scaled(traffic.total_bytes, 'B')}: weights"
                f" {scaled(traffic.weights_bytes, 'B')}, cache read"
                f" {scaled(traffic.cache_read_bytes, 'B')}, written"
                f" {scaled(traffic.cache_written_bytes, 'B')}"
            )
        )
    found += [Text(f"assumed: {line}", style="dim") for line in work.assumptions]
    return found


def _count(number: int) -> str:
    for factor, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= factor:
            return f"{significant(number / factor)} {name}"
    return str(number)


def document(work: Work) -> dict[str, Any]:
    """Everything, in FLOPs and bytes."""
    sums = total(work.parts)
    chosen = work.chosen
    whole: dict[str, Any] = {
        "convention": chosen.convention,
        "model_flops": chosen.model_per_step,
        "hardware_flops": chosen.hardware_per_step,
        "tokens": chosen.tokens_per_step,
        "model_flops_per_token": chosen.model_per_step / (chosen.tokens_per_step or 1),
        "parameters": work.params,
        "parameters_active": work.params_active,
        "parameters_trained": work.params_trained,
        "parts": {part: _numbers(flops) for part, flops in work.parts.items()},
        "exact": _numbers(sums),
        "conventions": {
            name: {
                "model_flops": flops.model_per_step,
                "hardware_flops": flops.hardware_per_step,
                "model_flops_per_token": flops.model_per_step / (flops.tokens_per_step or 1),
                "formula": CONVENTIONS[name].formula,
            }
            for name, flops in work.flops.items()
        },
        "left_out": work.left_out,
        "assumptions": list(work.assumptions),
    }
    traffic = work.traffic
    if traffic is not None:
        whole["bytes_moved"] = {
            "weights": traffic.weights_bytes,
            "cache_read": traffic.cache_read_bytes,
            "cache_written": traffic.cache_written_bytes,
            "total": traffic.total_bytes,
        }
    return whole


def _numbers(flops: PartFlops) -> dict[str, float]:
    return {
        "forward": flops.forward,
        "backward": flops.backward,
        "again": flops.recomputed,
        "model": flops.model,
        "hardware": flops.hardware,
    }


def readings(found: dict[str, Result]) -> dict[str, Any]:
    """Readings by key, as `erg report --json` has them."""
    return {"readings": {key: result(one) for key, one in found.items()}}


def reading_lines(found: dict[str, Result]) -> list[Text]:
    """Readings as a person reads them: the figure, then how it came about."""
    said = []
    for key, one in found.items():
        if isinstance(one, Missing):
            said.append(Text(f"{key}  - ({one.reason})", style="dim"))
            continue
        value = f"{100 * one.value:.2f} %" if one.unit == "frac" else scaled(one.value, one.unit)
        line = Text(f"{key}  ")
        line.append(value, style="bold")
        line.append(f"  ({one.basis}; {one.note})", style="dim")
        said.append(line)
    return said

"""The work of a step as tables and as JSON, and readings in lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.flops.analytic import total
from ergmeter.flops.conventions import CONVENTIONS, LETTERS
from ergmeter.metrics.definitions.compute import NotApplicable, percent
from ergmeter.records import Missing
from ergmeter.units import scaled, significant
from ergmeter.views.documents import result

if TYPE_CHECKING:
    from ergmeter.flops.analytic import PartFlops
    from ergmeter.flops.work import Work
    from ergmeter.records import Result


def parts_table(work: Work) -> Table:
    """What each part of the model costs in a step."""
    sums, tokens = total(work.parts), work.batch.tokens_real
    step, token = _scale(sums.model), _scale(sums.model / tokens)
    extra = "; extra: computed again, or on padding" if sums.recomputed else ""
    one = _token(work)
    each = f", {token[1]}FLOP {one}" if tokens > 1 else ""
    table = _table(f"exact, by part: {step[1]}FLOP a step{each}{extra}")
    table.add_column("part", no_wrap=True)
    columns = ["forward", *(["backward"] if sums.backward else [])]
    columns += ["extra"] if sums.recomputed else []
    for name in (*columns, "share", *([one] if tokens > 1 else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for part, flops in [*work.parts.items(), ("all", sums)]:
        if not flops.hardware:
            continue
        values = {"forward": flops.forward, "backward": flops.backward, "extra": flops.recomputed}
        table.add_row(
            part,
            *(_number(values[name], step) for name in columns),
            percent(flops.model / sums.model),
            *([_number(flops.model / tokens, token)] if tokens > 1 else []),
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
    """In the unit of the table; what is too little for it, in one of its own."""
    if not value:
        return "-"
    if value < _LEAST * scale[0]:
        return scaled(value, "FLOP")
    return significant(value / scale[0])


_LEAST = 1e-3


def _token(work: Work) -> str:
    """What a figure for each token is for: padding is no token."""
    return "a token" if work.batch.tokens == work.batch.tokens_real else "a real token"


def conventions_table(work: Work) -> Table | None:
    """The step under each convention, and how far each is from the chosen one, if there are any."""
    if len(work.flops) == 1:
        return None
    chosen = work.chosen
    tokens = chosen.tokens_per_step or 1
    step, token = _scale(chosen.model_per_step), _scale(chosen.model_per_step / tokens)
    one = _token(work)
    table = _table(f"as others count it: {step[1]}FLOP a step, {token[1]}FLOP {one}")
    table.add_column("convention", no_wrap=True)
    for name in ("a step", one, f"vs {chosen.convention}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_PER[work.phase], style="dim")
    for name, flops in work.flops.items():
        off = round(100 * (flops.model_per_step / chosen.model_per_step - 1), 1)
        table.add_row(
            name,
            _number(flops.model_per_step, step),
            _number(flops.model_per_step / tokens, token),
            "" if flops is chosen else f"{off or 0.0:+.1f} %",
            CONVENTIONS[name].formula,
        )
    return table


# Their formulas are of training; reading a prompt is a third of it.
_PER = {"train": "formula, a token", "prefill": "a third of this, a token", "decode": ""}


def convention_lines(work: Work) -> list[Text]:
    """What stands below the conventions: letters, and those that say nothing of this step."""
    used = {letter for name in work.flops for letter in CONVENTIONS[name].letters}
    said = []
    if used:
        words = ", ".join(f"{letter} {LETTERS[letter]}" for letter in LETTERS if letter in used)
        said.append(f"{words}. `erg conventions NAME` says what each counts.")
    if used and not work.batch.is_grid:
        said.append("formulas count whole sequences with their padding, not documents")
    elsewhere = work.not_defined
    if work.training.lora is None:  # of what is for LoRA there is no need to speak
        elsewhere = {n: why for n, why in elsewhere.items() if not CONVENTIONS[n].is_for_lora}
    for reason, names in _by_reason(elsewhere).items():
        which = ", ".join(names) if len(work.flops) > 1 else "every other convention"
        said.append(f"not defined here: {which}: {reason}")
    return [Text(line, style="dim") for line in said]


def _by_reason(reasons: dict[str, str]) -> dict[str, list[str]]:
    """What shares a reason, so that it is said once."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def lines(work: Work) -> list[Text]:
    """What stands above the tables: the step, the model, the bytes, what is assumed."""
    said = [f"{_count(work.params)} parameters"]
    if work.params_active != work.params:
        said.append(f"{_count(work.params_active)} active per token")
    if work.params_trained != work.params and work.phase == "train":
        share = 100 * work.params_trained / work.params
        said.append(f"{_count(work.params_trained)} trained ({significant(share, 3)} %)")
    found = [Text(_step(work), style="bold"), Text(", ".join(said))]
    if work.params_given is not None:
        used = ", ".join(work.of_params_given)
        found.append(Text(f"given: N = {_count(work.params_given)} parameters, in {used}"))
    traffic = work.traffic
    if traffic is not None:
        moved = (
            f"must move {scaled(traffic.total_bytes, 'B')}: weights"
            f" {scaled(traffic.weights_bytes, 'B')} (of {scaled(work.kept_bytes or 0, 'B')} kept),"
            f" cache read {scaled(traffic.cache_read_bytes, 'B')}, written"
            f" {scaled(traffic.cache_written_bytes, 'B')}"
        )
        found.append(Text(moved))
    if work.kept:
        found.append(Text(f"kept: {'; '.join(work.kept)}", style="dim"))
    found += [Text(f"assumed: {line}", style="dim") for line in work.assumptions]
    return found


def _step(work: Work) -> str:
    """What one step is, in a line."""
    batch, first = work.batch, work.batch.documents[0]
    if work.phase == "decode":
        each = " each" if batch.sequences > 1 else ""
        whose = _several(batch.sequences, "sequence")
        return f"a decoding step: {whose}, one new token{each} after {first.past} cached"
    laid_out = f"{_several(batch.sequences, 'sequence')} of {batch.seq_len} tokens"
    if not batch.is_grid:
        documents = sum(document.count for document in batch.documents)
        laid_out = (
            f"{_several(documents, 'document')}, {batch.tokens_real} tokens in all, in {laid_out}"
        )
    elif batch.sequences > 1:
        laid_out += f", {batch.tokens} in all"
    if batch.images:
        laid_out += f", {_several(batch.images, 'image')} in them"
    if work.phase == "prefill":
        return f"reading a prompt (forward): {laid_out}" + (
            f", after {first.past} cached" if first.past else ""
        )
    again = work.training.checkpointing
    how = "" if again == "none" else f", {again} checkpointing"
    return f"a training step (forward and backward{how}): {laid_out}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
        "step": _step(work),
        "phase": work.phase,
        "convention": chosen.convention,
        "model_flops": chosen.model_per_step,
        "hardware_flops": chosen.hardware_per_step,
        "tokens": chosen.tokens_per_step,
        "model_flops_per_token": chosen.model_per_step / (chosen.tokens_per_step or 1),
        "parameters": work.params,
        "parameters_active": work.params_active,
        "parameters_trained": work.params_trained,
        **_n_given(work),
        "parts": {part: _numbers(flops) for part, flops in work.parts.items()},
        "exact": _numbers(sums),
        "conventions": {
            name: {
                "model_flops": flops.model_per_step,
                "hardware_flops": flops.hardware_per_step,
                "model_flops_per_token": flops.model_per_step / (flops.tokens_per_step or 1),
                "formula": CONVENTIONS[name].formula,
                "letters": CONVENTIONS[name].letters,
            }
            for name, flops in work.flops.items()
        },
        "not_defined": work.not_defined,
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
        whole["kept"] = {"weights_bytes": work.kept_bytes, "as": list(work.kept)}
    return whole


def _n_given(work: Work) -> dict[str, Any]:
    if work.params_given is None:
        return {}
    return {"N_given": {"value": work.params_given, "used_by": work.of_params_given}}


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


def reading_lines(found: dict[str, Result]) -> list[Text | Padding]:
    """Readings as a person reads them: the figure, then how it came about; then what is absent.

    What does not apply to the job is not a row, and a reason that several share is said once.
    """
    said: list[Text | Padding] = []
    absent: dict[str, str] = {}
    for key, one in found.items():
        if isinstance(one, Missing):
            if not isinstance(one, NotApplicable):
                absent[key] = one.reason
            continue
        is_share = one.unit == "frac"
        value = percent(one.value, decimals=2) if is_share else scaled(one.value, one.unit)
        line = Text(f"{key}  ")
        line.append(value, style="bold")
        line.append(one.mark, style="bold red")
        line.append(f"  {one.basis}", style="dim")
        said += [line, _below("; ".join(part for part in (one.impossible, one.note) if part))]
    for reason, keys in _by_reason(absent).items():
        said += [Text(f"{', '.join(keys)}  -"), _below(reason)]
    return said


def _below(note: str) -> Padding:
    return Padding(Text(note, style="dim"), (0, 0, 0, 2), expand=False)

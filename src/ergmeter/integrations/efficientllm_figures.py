"""EfficientLLM's figures from a run's totals, and the forms in which people look at them.

The console block and the TensorBoard names are those of the EfficientLLM module's documentation.
The trap they come with: 0 for what was not measured. A figure that is absent says why in the block,
and TensorBoard gets no point for it.

Which time a figure is over: AL, TT and ST over the time inside iterations, as their formulas have
it (so that TT x parameters x AL is the tokens of an iteration); AMU, PCU and AEC over the wall
clock from the first iteration to the last. The catalogue's tokens/s/param, which `erg report`
shows, is over the wall clock too: evaluation and whatever else lies between iterations lowers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from ergmeter.records import Missing

if TYPE_CHECKING:
    from ergmeter.metrics.running import Amount, Totals

Figures: TypeAlias = "Mapping[str, Amount]"

# The documented lines: name in TensorBoard and in `get_all_metrics`, label and form on the console.
DOCUMENTED = (
    ("amu_gb", "AMU (GB)", ".2f"),
    ("pcu_ratio", "PCU (Ratio)", ".3f"),
    ("al_seconds", "AL (Seconds)", ".4f"),
    ("tt_tokens_per_param_per_sec", "TT (Tokens/Param/Sec)", ".2e"),
    ("st_samples_per_param_per_sec", "ST (Samples/Param/Sec)", ".2e"),
    ("aec_watts", "AEC (Watts)", ".2f"),
)
ENERGY = ("energy_joules", "Energy (J)", ".1f")  # what AEC's name promises; after the documented
IT = "it_tokens_per_sec"
TAG = "efficientllm/"
_BYTES_PER_GB = 1e9


def figures(totals: Totals | Missing, parameters: int | None) -> dict[str, Amount]:
    """The figures of a run so far, in the order of the block. `totals` may say why there are none.

    `parameters` is what the caller declared to be the size of the model.
    """
    if isinstance(totals, Missing):
        return {name: totals for name, _, _ in (*DOCUMENTED, ENERGY)}
    size: Amount = float(parameters) if parameters else Missing(_NO_SIZE)
    per_parameter = _times(size, totals.in_steps_s)
    return {
        "amu_gb": _over(totals.memory_byte_s, totals.window_s * _BYTES_PER_GB),
        "pcu_ratio": _over(totals.busy_s, totals.window_s),
        "al_seconds": totals.in_steps_s / totals.steps,
        "tt_tokens_per_param_per_sec": _over(_counted(totals.tokens, "tokens"), per_parameter),
        "st_samples_per_param_per_sec": _over(_counted(totals.samples, "samples"), per_parameter),
        "aec_watts": _over(totals.energy_j, totals.window_s),
        "energy_joules": totals.energy_j,
    }


_NO_SIZE = "the number of parameters was not given to initialize_efficientllm_metrics"


def block(head: str, loss: Amount, found: Figures) -> str:
    """The console block, with the energy as one line more than is documented."""
    lines = [f"[EfficientLLM Metrics] {head}:", f"  Loss: {_text(loss, '.6f')}"]
    lines += [f"  {label}: {_text(found[name], form)}" for name, label, form in DOCUMENTED]
    name, label, form = ENERGY
    lines.append(f"  {label}: {_text(found[name], form)}")
    return "\n".join(lines) + "\n"


def scalars(found: Figures) -> dict[str, float]:
    """What goes to TensorBoard, by tag: the six documented, as far as they are known."""
    known = ((name, found[name]) for name, _, _ in DOCUMENTED)
    return {f"{TAG}{name}": value for name, value in known if not isinstance(value, Missing)}


def _text(amount: Amount, form: str) -> str:
    """A figure, or why there is none: in few words, because the block comes again and again."""
    if isinstance(amount, Missing):
        return f"- ({amount.reason.partition(' (')[0].partition('; ')[0]})"
    return format(amount, form)


def _counted(amount: Amount, what: str) -> Amount:
    """A count of 0 says that nobody counted."""
    return Missing(f"the iterations count 0 {what}") if amount == 0 else amount


def _times(amount: Amount, factor: float) -> Amount:
    return amount if isinstance(amount, Missing) else amount * factor


def _over(amount: Amount, by: Amount) -> Amount:
    if isinstance(amount, Missing):
        return amount
    return by if isinstance(by, Missing) else amount / by

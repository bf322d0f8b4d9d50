"""MFU, HFU and FLOP/s: how much of the hardware's arithmetic was used.

MFU = FLOPs a token needs x tokens per second / (devices x dense peak of the type computed in).
(PaLM, arXiv 2204.02311, appendix B.) HFU also counts recomputed and padded work.

Every reading names its convention, its peak with the source, and the spread over the other
conventions. Nothing is clamped: a share above 1 is marked as impossible, with the most frequent
causes, and no other metric is computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric, over_whole_run
from ergmeter.metrics.definitions.peaks import NARROW, NoPeak, Peak, declared_peak, device_peak
from ergmeter.metrics.definitions.throughput import samples_per_s, steps_per_s, tokens_per_s
from ergmeter.metrics.definitions.tokens import positions_per_token
from ergmeter.metrics.evidence.ranks import need_all, need_devices
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.records import (
    Basis,
    Device,
    Flops,
    Missing,
    Reading,
    Result,
    mapped,
    or_missing,
    present,
    weakest,
)
from ergmeter.units import number_of, percent, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.metrics.evidence.evidence import Evidence

    _Share = Callable[..., Reading]

MFU = "utilization.mfu_frac"
MFU_BF16 = "utilization.mfu_bf16_peak_frac"
HFU = "utilization.hfu_frac"
ALL_WORK = "utilization.all_work_frac"
FLOPS_PER_STEP = "compute.model_flops_per_step"
FLOPS_PER_S = "compute.model_flops_per_s_per_device"
FLOPS_PER_TOKEN = "compute.model_flops_per_token"
BANDWIDTH = "utilization.bandwidth_frac"

_ABOVE_PEAK = (
    "an input is wrong, likely the number of devices, the peak or its dtype, tokens counted twice,"
    " FLOPs of frozen weights or masked pairs, or a time that did not wait for the device"
)
_ABOVE_BANDWIDTH = "an input is wrong, likely the batch size, the dtype or the number of devices"


@dataclass(frozen=True, slots=True)
class NotApplicable(Missing):
    """A metric that does not apply to this job, with the reason."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Tokens per second of all devices together, as measured or reported.

    For a model that reads no tokens: samples or steps per second, as `unit` states.
    """

    tokens_per_s: float
    devices: int
    basis: Basis
    note: str
    low: float | None = None
    high: float | None = None
    positions_per_token: float = 1.0  # computed positions: more than 1 if rows are padded
    unit: str = "token"  # or sample, or step


def compute_results(
    flops: Sequence[Flops], rate: TokenRate, peak: Peak | Missing
) -> dict[str, Result]:
    """FLOP/s, MFU, HFU and the like. `flops`: under each convention, the chosen one first."""
    chosen = flops[0]
    per_token = flops_per_unit(chosen, rate.unit)
    counted = ", ".join(dict.fromkeys((chosen.convention, chosen.engine)))
    note = f"{_bound(chosen)}{counted}{_attention(chosen)}{_declared_note(chosen)}{_spread(flops)}"
    results: dict[str, Result] = {
        FLOPS_PER_TOKEN: Reading(per_token, "FLOP/token", "derived", note=note)
        if rate.unit == "token"
        else NotApplicable("the model reads no tokens: compute.model_flops_per_step has its FLOPs")
    }
    each = per_token * rate.tokens_per_s / rate.devices
    scale = each / rate.tokens_per_s if rate.tokens_per_s else 0.0
    low, high = (None if edge is None else edge * scale for edge in (rate.low, rate.high))
    basis = weakest("derived", rate.basis)
    over = f"{number_of(rate.devices, 'device')}; {rate.note}"
    results[FLOPS_PER_S] = Reading(each, "FLOP/s", basis, low, high, f"{chosen.convention}; {over}")
    share = _shares(each, low, high, basis)
    if isinstance(peak, Missing):
        return results | _without_peak(peak, chosen, rate, each, share)
    mfu = share(
        peak,
        each,
        peak.flops_per_s,
        f"{_bound(chosen)}{chosen.convention}{_attention(chosen)}{_declared_note(chosen)}"
        f"{_spread(flops, rate=rate, peak=peak)}; of {peak.text}; {over}",
    )
    results[MFU] = mfu = _BY_KEY[MFU].checked(mfu)
    results[HFU] = _hfu(chosen, rate, each, share, peak)
    results[ALL_WORK] = _all_work(chosen, rate, each, share, peak)
    results[MFU_BF16] = _against_bf16(each, share, peak, dtype=peak.dtype, mfu=mfu)
    results[BANDWIDTH] = _bandwidth(chosen, rate, peak)
    return results


def _shares(each: float, low: float | None, high: float | None, basis: Basis) -> _Share:
    """Return a function that turns a rate into its share of a peak, with the same interval."""

    def share(peak: Peak, value: float, against: float, note: str) -> Reading:
        edges = (None if edge is None else edge * value / each / against for edge in (low, high))
        low_frac, high_frac = edges
        basis_of_both = weakest(basis, peak.basis)
        return Reading(value / against, "frac", basis_of_both, low_frac, high_frac, note)

    return share


def _without_peak(
    peak: Missing, chosen: Flops, rate: TokenRate, each: float, share: _Share
) -> dict[str, Result]:
    """The results that are possible if the device's peak for the dtype is unknown."""
    wide = peak.bf16 if isinstance(peak, NoPeak) else None
    dtype = peak.dtype if isinstance(peak, NoPeak) else ""
    results: dict[str, Result] = dict.fromkeys((MFU, HFU, ALL_WORK, MFU_BF16, BANDWIDTH), peak)
    if wide is not None:
        results[MFU_BF16] = _against_bf16(each, share, wide, dtype=dtype)
        results[BANDWIDTH] = _bandwidth(chosen, rate, wide)
    elif dtype not in NARROW:
        results[MFU_BF16] = _one_peak(dtype)
    if chosen.bytes_per_step is None:
        results[BANDWIDTH] = NO_BYTES
    return results


# What `flops.work` and `flops.step_work` write among a step's assumptions.
_STORED_AS = "kept: "
_DECLARED = "given: "
NO_RECOMPUTATION = "no recomputation"
_ATTENTION = "attention: "


def assumed(chosen: Flops, prefix: str) -> list[str]:
    """The assumptions of a FLOP count that begin with a prefix, without it."""
    return [text.removeprefix(prefix) for text in chosen.assumptions if text.startswith(prefix)]


def _declared_note(chosen: Flops) -> str:
    """The user-declared values that a FLOP count uses, for a note."""
    return "".join(f" with {figure}" for figure in assumed(chosen, _DECLARED))


def _attention(chosen: Flops) -> str:
    """For a note: which attention pairs were counted, if the convention does not define that."""
    return "".join(f" ({_ATTENTION}{pairs})" for pairs in assumed(chosen, _ATTENTION))


NO_BYTES = NotApplicable(
    "the bytes that a step moves are counted for inference only: pass --model-config with"
    " --phase decode"
)
NO_DTYPE = (
    "the dtype of the matmuls is unknown, and rates differ by dtype: pass --dtype (bf16, fp16, fp8,"
    " tf32, ...)"
)


def _one_peak(dtype: str) -> NotApplicable:
    which = f"the matmuls are in {dtype}" if dtype else "the dtype of the matmuls was not given"
    return NotApplicable(f"{which}: only fp8, fp4 and int8 have a second peak; see {MFU}")


def _bandwidth(chosen: Flops, rate: TokenRate, peak: Peak) -> Result:
    """The memory bandwidth that was needed, as a share of the device's peak bandwidth."""
    if chosen.bytes_per_step is None or not chosen.tokens_per_step:
        return NO_BYTES
    if peak.bandwidth_bytes_per_s is None:
        return Missing(
            f"the memory bandwidth of {peak.device} is unknown: if `erg peaks` lists it, pass its"
            " exact name with --device"
        )
    per_token = chosen.bytes_per_step / chosen.tokens_per_step
    factor = per_token / rate.devices / peak.bandwidth_bytes_per_s
    low, high = (None if edge is None else edge * factor for edge in (rate.low, rate.high))
    stored_as = assumed(chosen, _STORED_AS)
    note = (
        f"weights and cache, the least that can be moved, {scaled(per_token, 'B')} a token"
        f"{''.join(f'; {storage}' for storage in stored_as)}"
        f"; of {scaled(peak.bandwidth_bytes_per_s, 'B/s')}"
        f" ({peak.bandwidth_source or peak.source}); {rate.note}"
    )
    is_assumed = any("assumed" in storage for storage in stored_as)
    basis = weakest("derived", rate.basis, "assumed" if is_assumed else "reported")
    ratio = rate.tokens_per_s * factor
    return _BY_KEY[BANDWIDTH].checked(Reading(ratio, "frac", basis, low, high, note))


def flops_per_token(flops: Flops) -> float:
    """Model FLOPs per token: those of the counted step / its tokens."""
    if not flops.tokens_per_step:
        raise NotMeasurable(
            "the FLOPs of a step were given without its tokens: pass tokens_per_step in Flops(...)"
        )
    return flops.model_per_step / flops.tokens_per_step


def flops_per_unit(flops: Flops, unit: str) -> float:
    """Model FLOPs per `unit`: token, sample or step."""
    if unit == "token":
        return flops_per_token(flops)
    per_step = flops.samples_per_step if unit == "sample" else 1
    return flops.model_per_step / (per_step or 1)


def _bound(chosen: Flops) -> str:
    """For a note: the matmuls that the count lacks, which makes it a lower bound; else ""."""
    if not chosen.not_counted:
        return ""
    return f"a lower bound, as these were not counted: {', '.join(chosen.not_counted)}; "


def _hardware_ratio(chosen: Flops, rate: TokenRate) -> float:
    """FLOPs with recomputation and padding / the model's. NotMeasurable if unknown."""
    if chosen.hardware_per_step is None:
        raise NotMeasurable(
            "recomputation is unknown: the FLOP count has no hardware_per_step; pass"
            " --model-config, and --checkpointing where activations are recomputed"
        )
    ratio = chosen.hardware_per_step / chosen.model_per_step
    padding = rate.positions_per_token - 1
    if padding:
        if chosen.hardware_per_padding is None:
            raise NotMeasurable(
                f"{percent(padding / (1 + padding))} of the positions are padding, and the FLOP"
                " count has no cost of one (hardware_per_padding)"
            )
        # Padding passes through every layer, but adds no attention pairs.
        ratio += padding * chosen.hardware_per_padding / flops_per_token(chosen)
    return ratio


def _all_work(chosen: Flops, rate: TokenRate, each: float, share: _Share, peak: Peak) -> Result:
    """All computed FLOPs as a share of the peak; a lower bound if a part is unknown."""
    missing = list(chosen.not_counted)
    ratio = or_missing(_hardware_ratio, chosen, rate)
    if isinstance(ratio, Missing):
        missing.append(ratio.reason)
        ratio = 1.0
    parts = {"model": 1.0, "recomputation and padding": ratio - 1}
    if chosen.other_work is None:
        missing.append("other models and generation, which were not looked for")
    for part in chosen.other_work or ():
        if part.flops is None:
            missing.append(f"{part.name} ({part.note})")
        else:
            parts[part.name] = parts.get(part.name, 0.0) + part.flops / chosen.model_per_step
    total = sum(parts.values())
    shares = ", ".join(f"{name} {percent(part / total)}" for name, part in parts.items() if part)
    bound = f"a lower bound, as these were not counted: {'; '.join(missing)}. " if missing else ""
    reading = share(peak, each * total, peak.flops_per_s, f"{bound}{shares}; of {peak.text}")
    return _BY_KEY[ALL_WORK].checked(reading)


def _hfu(chosen: Flops, rate: TokenRate, each: float, share: _Share, peak: Peak) -> Result:
    ratio = or_missing(_hardware_ratio, chosen, rate)
    if isinstance(ratio, Missing):
        return ratio
    is_assumed = bool(assumed(chosen, NO_RECOMPUTATION))
    source = "by what the options or the model itself say"
    if is_assumed:
        source = "as assumed: pass --checkpointing where activations are recomputed"
    note = (
        f"{chosen.convention}, with what is computed again or on padding, {ratio:.3f} times the"
        f" model's{'; no recomputation, ' + source if is_assumed else ''}"
        if ratio != 1
        else f"equals MFU, {_nothing_twice(chosen)}, {source}"
    )
    note = f"{_bound(chosen)}{note}"
    reading = share(peak, each * ratio, peak.flops_per_s, f"{note}; of {peak.text}")
    return _BY_KEY[HFU].checked(replace(reading, basis="assumed") if is_assumed else reading)


def _nothing_twice(chosen: Flops) -> str:
    """For the note of an HFU that equals MFU: what is known about work beside the model."""
    if chosen.other_work:
        beside = " and ".join(part.name for part in chosen.other_work)
        return f"no recomputation; {beside}: see {ALL_WORK}"
    if chosen.other_work is None:
        return "no recomputation, other models were not looked for"
    return "nothing is computed twice"


def _against_bf16(
    each: float, share: _Share, peak: Peak, *, dtype: str, mfu: Reading | None = None
) -> Result:
    if dtype not in NARROW:
        return _one_peak(dtype)
    if mfu is not None and mfu.impossible:
        return or_missing(_BY_KEY[MFU].usable, mfu)
    if peak.bf16_flops_per_s is None:
        return Missing(
            f"the bf16 peak of {peak.device} is unknown; {MFU} is against its {dtype} peak"
        )
    note = (
        f"products in {dtype}, compared with the bf16 peak of"
        f" {scaled(peak.bf16_flops_per_s, 'FLOP/s')}; can be above 1"
    )
    return share(peak, each, peak.bf16_flops_per_s, note)


# A count beyond this factor of the chosen one counts something else, such as all experts.
_COMPARABLE = 2.0


def _spread(
    flops: Sequence[Flops], *, rate: TokenRate | None = None, peak: Peak | None = None
) -> str:
    """For a note: lowest, highest and outlying FLOPs (or MFU) under the other conventions."""
    if len(flops) == 1:
        return ""
    chosen = flops_per_token(flops[0])
    others = sorted((flops_per_token(count), count.convention) for count in flops[1:])
    near = [count for count in others if chosen / _COMPARABLE <= count[0] <= chosen * _COMPARABLE]
    far = [count for count in others if count not in near]

    def as_text(value: float, name: str) -> str:
        if rate is None or peak is None:
            return f"{scaled(value, 'FLOP')} ({name})"
        share = value * rate.tokens_per_s / rate.devices / peak.flops_per_s
        return f"{percent(share, decimals=1 if share >= _ONE_DECIMAL_FROM else 2)} ({name})"

    def ends(counts: list[tuple[float, str]]) -> str:
        most = f" to {as_text(*counts[-1])}" if len(counts) > 1 else ""
        return f"{as_text(*counts[0])}{most}"

    words = f"; other conventions {ends(near)}" if near else ""
    return f"{words}; more than a factor of 2 away: {ends(far)}" if far else words


_ONE_DECIMAL_FROM = 0.1  # from here on, one decimal of a percent is enough

# Results of a run.


@cached_result
def run_results(evidence: Evidence) -> dict[str, Result]:
    """FLOP/s, MFU, HFU and the like of a run."""
    if not evidence.flops:
        raise NotMeasurable(
            evidence.run.no_flops
            or "the FLOPs of a step are unknown: erg record --model-config config.json --seq-len"
            " N, or Meter(model=..., seq_len=N)"
        )
    if not evidence.flops[0].model_per_step:
        raise NotMeasurable("the FLOP count of a step is 0: no matmul was counted in it")
    unit, speed = _speed(evidence)
    if not speed.value:
        raise NotMeasurable(f"this run has 0 {unit}s per second, so no FLOP/s")
    if speed.basis != "reported":
        need_all(evidence)
    if evidence.settings.num_devices is None:
        need_devices(evidence)
    devices, peak = _run_peak(evidence)
    positions = positions_per_token(evidence)
    rate = TokenRate(
        speed.value, devices, speed.basis, speed.note, speed.low, speed.high, positions, unit
    )
    return compute_results(evidence.flops, rate, peak)


def _speed(evidence: Evidence) -> tuple[str, Reading]:
    """Return the unit and its rate: tokens, or samples or steps of a model without tokens."""
    chosen = evidence.flops[0]
    if chosen.tokens_per_step or chosen.engine != "counted":
        return "token", tokens_per_s(evidence)
    if chosen.samples_per_step:
        return "sample", samples_per_s(evidence)
    pace = steps_per_s(evidence)
    ranks = len(evidence.counted.lanes) if evidence.has_work else 1
    return "step", mapped(pace, lambda rate: rate * ranks)


def _flops_per_step(evidence: Evidence) -> Reading:
    """Model FLOPs of a step, all ranks together, from its number of tokens, samples or steps."""
    if not evidence.flops:
        run_results(evidence)  # raises with the reason
    chosen = evidence.flops[0]
    unit, speed = _speed(evidence)
    value = flops_per_unit(chosen, unit) * speed.value / steps_per_s(evidence).value
    basis = weakest("derived", speed.basis)
    note = f"{_bound(chosen)}{chosen.convention}, by the {unit}s of a step; all ranks"
    return Reading(value, "FLOP/step", basis, note=note)


def _run_peak(evidence: Evidence) -> tuple[int, Peak | Missing]:
    """Return the number of devices, and the peak of one device or why it is unknown."""
    settings = evidence.settings
    gpus = evidence.devices("gpu")
    nodes = evidence.devices("node")
    devices = settings.num_devices or len(gpus) or len(nodes) or 1
    if settings.peak_flops_per_s is not None:
        names = {gpu.name for gpu in gpus}
        return devices, declared_peak(
            settings.peak_flops_per_s,
            settings.dtype,
            settings.peak_source,
            device=settings.device or (names.pop() if len(names) == 1 else None),
        )
    return devices, or_missing(_device_peak, evidence, gpus, nodes)


def _device_peak(evidence: Evidence, gpus: list[Device], nodes: list[Device]) -> Peak | NoPeak:
    """The peak of the device that the user named; otherwise of the GPUs or the CPU sampled."""
    device, dtype = evidence.settings.device, evidence.settings.dtype
    if device is None and not gpus:
        return _cpu_peak(nodes, dtype)
    names = [device] if device else sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise NotMeasurable(f"different GPUs ({', '.join(names)}) have no common peak: pass --peak")
    if dtype is None:
        raise NotMeasurable(NO_DTYPE)
    peak = device_peak(names[0], dtype)
    if device is None or isinstance(peak, NoPeak):
        return peak
    return replace(peak, source=f"{peak.device}, as named: {peak.source}")


def _cpu_peak(nodes: Sequence[Device], dtype: str | None) -> Peak:
    if not nodes:
        raise NotMeasurable(
            "unknown peak: pass --peak or --device (no GPU and no host was sampled in this run)"
        )
    facts = nodes[0].facts
    peaks = facts.get("cpu_peak_flops_per_s") or {}
    wanted = dtype or "fp32"
    # A CPU without units for a 16-bit type computes it in fp32.
    flops_per_s = peaks.get(wanted) or (peaks.get("fp32") if wanted in ("bf16", "fp16") else None)
    if flops_per_s is None:
        why = facts.get("no_cpu_peak", f"the CPU's {wanted} peak was not recorded")
        raise NotMeasurable(f"unknown peak: pass --peak ({why})")
    source = str(facts.get("cpu_peak_source", "derived from its parts"))
    return Peak(str(facts.get("cpu_model", "CPU")), wanted, float(flops_per_s), source, "assumed")


def of_run(evidence: Evidence, key: str) -> Reading:
    """One result of a run. Raises NotMeasurable with the reason if it is missing."""
    return present(run_results(evidence)[key])


def need_possible(evidence: Evidence, *keys: str) -> None:
    """Raises NotMeasurable if one of these readings is impossible. A missing one passes."""
    for key in keys:
        result = run_results(evidence)[key]
        if isinstance(result, Reading):
            _BY_KEY[key].usable(result)


_NEEDS = ("the FLOPs of a step", "tokens")


def _result(key: str, title: str, unit: str, **declared: Any) -> Metric:  # noqa: ANN401
    """A metric that `run_results` computes."""
    fields = {"direction": "higher", "needs": _NEEDS, **declared}
    return Metric(key, title, unit, compute=partial(of_run, key=key), **fields)


_of_peak = partial(
    _result, unit="frac", needs=(*_NEEDS, "a peak"), upper_bound=1.0, above_bound=_ABOVE_PEAK
)

METRICS = [
    _of_peak(
        MFU,
        "MFU",
        formula="FLOPs of a token x tokens/s / (devices x dense peak of the type computed in)",
        aliases=(Alias("mfu", "profiler MFU monitors", "model FLOPs utilisation", "frac"),),
        noun="MFU",
        quantity="speed",
        column="mfu_frac",
        rule="mfu",
        views="short card 80 as MFU expected; list 25 as MFU;"
        " card 500 in compute; report 70 expected; citation 20; model card 80 expected;"
        " ladder 60; watch 70 as MFU; so far 30; serve list 30; serve live 60; serve run 30;"
        " console 40; ledger 50 as mfu; ledger notes 40 as mfu; compare 70;"
        " bench matrix 50; analyze 10;"
        " analyze json 40 in % as mfu_percent; analyze compare 10",
    ),
    _of_peak(
        HFU,
        "HFU",
        formula="as MFU, with the FLOPs that are computed a second time or on padding",
        quantity="speed",
        views="card 540 in compute; model card 100; ladder 50; analyze 20;"
        " analyze json 50 in % as hfu_percent",
    ),
    _of_peak(
        ALL_WORK,
        "all work, of the peak",
        formula="as HFU, with the FLOPs of other models and of generation; a lower bound where one"
        " is not counted",
    ),
    _of_peak(
        MFU_BF16,
        "MFU against the bf16 peak",
        formula="as MFU, of products in fp8, fp4 or int8 against the bf16 peak",
        upper_bound=None,
        quantity="speed",
        views="card 530 in compute",
    ),
    _of_peak(
        BANDWIDTH,
        "memory bandwidth used",
        formula="bytes that a token has to move x tokens/s / (devices x memory bandwidth)",
        needs=("the bytes of a decoding step", "tokens", "a bandwidth"),
        views="card 550 in compute",
        aliases=(Alias("mbu", "inference benchmarks", "model bandwidth utilisation", "frac"),),
        above_bound=_ABOVE_BANDWIDTH,
    ),
    _result(
        FLOPS_PER_S,
        "model FLOP/s per device",
        "FLOP/s",
        formula="FLOPs of a token x tokens/s / devices",
        quantity="speed",
        views="card 560 in compute",
    ),
    _result(
        FLOPS_PER_TOKEN,
        "model FLOPs per token",
        "FLOP/token",
        direction="neither",
        formula="model FLOPs of a step / its tokens, under the convention of the note",
        needs=("the FLOPs of a step",),
    ),
    Metric(
        FLOPS_PER_STEP,
        "model FLOPs per step",
        "FLOP/step",
        "neither",
        "FLOPs of a token (or a sample) x tokens (or samples) of a step, over all ranks",
        ("the FLOPs of a step",),
        _flops_per_step,
    ),
]

METRICS += over_whole_run(
    METRICS,
    MFU,
    is_in_bench=True,
    views="short card 80 in whole run as MFU;"
    " card 510 in compute; report 80; model card 90 in the whole run; console 100; compare 80;"
    " bench matrix 70",
)
_BY_KEY = {metric.key: metric for metric in METRICS}

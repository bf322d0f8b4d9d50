"""Pairs the configurations of NEW with those of REF, and lists what was measured differently.

Bench cells are paired by their settings and not by position. Differences in measuring (device,
memory tracker, window of the rates) are reported, since they may cause a slowdown. Runs, ledger
rows and analyses are paired by the columns of `--by`, by backend if there are several, else as one
configuration; `grouping.fairness` checks whether two of them are comparable.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.compare.entry import NOT_COMPARABLE, Entry, Group, fact, over_one_window
from ergmeter.compare.grouping import Fairness, why_other_terms
from ergmeter.compare.verdicts import Verdict
from ergmeter.errors import UsageError, suggestion
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.evidence.window import REQUESTS, TRAINING
from ergmeter.records import or_none
from ergmeter.stats.ratio import RunNoise, Scale, contrast
from ergmeter.units import duration, significant

_Key: TypeAlias = tuple[str, ...]
_Sides: TypeAlias = tuple[Sequence[Entry], Sequence[Entry]]

_LAST = ("scenario", "framework_config")  # the name of a configuration that no setting names
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")
_GROUP = "group"  # the column of a configuration's id
_BACKEND = "backend"
_SIDES = ("NEW", "REF")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of a comparison."""

    group_by: tuple[str, ...] = ()
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    anyway: bool = False
    target_loss: float | None = None
    confidence: float = 0.95
    effect: float = 0.02
    noise: Mapping[str, RunNoise] = field(default_factory=dict)  # "" for all metrics
    by: tuple[str, ...] = ()  # the columns that configurations are matched by
    new_where: Mapping[str, str] = field(default_factory=dict)
    ref_where: Mapping[str, str] = field(default_factory=dict)


class NotComparable(UsageError):  # noqa: N818  an answer of `erg gate`, with its own exit code
    """The two sides can't be compared; the text is the reason."""


@dataclass(frozen=True, slots=True)
class ConfigurationPair:
    """The runs of one configuration on both sides; one side may be empty."""

    name: str
    new: Group
    ref: Group

    def common_key(self, measured: Metric) -> str | None:
        """The first metric of a measure that both sides have; None if there is none."""
        others = self.ref.keys_of(measured)
        keys = (key for key in self.new.keys_of(measured) if key in others)
        return next((k for k in keys if self.new.numbers(k) and self.ref.numbers(k)), None)


@dataclass(frozen=True, slots=True)
class Pairing:
    """All configurations of both sides, and the columns they were matched by."""

    by: tuple[str, ...]
    pairs: tuple[ConfigurationPair, ...]
    chosen: str = ""  # the rows selected on each side, in words

    @property
    def both(self) -> tuple[ConfigurationPair, ...]:
        """The configurations on both sides."""
        return tuple(pair for pair in self.pairs if pair.new.entries and pair.ref.entries)

    @property
    def only_ref(self) -> tuple[ConfigurationPair, ...]:
        """The configurations in REF alone: missing in NEW."""
        return tuple(pair for pair in self.pairs if not pair.new.entries)


def pair_sides(new: Sequence[Entry], ref: Sequence[Entry], options: CompareOptions) -> Pairing:
    """Pair the configurations of two sides by column values; columns of `where` don't count.

    NotComparable for windows of different kinds.
    """
    by, new_where, ref_where = options.by, options.new_where, options.ref_where
    new, ref = _of_one_window(new, ref)
    sides = _chosen(new, new_where, side="NEW"), _chosen(ref, ref_where, side="REF")
    without = {**new_where, **ref_where}
    for name in by:
        _check_column(name, sides)
    is_bench = all(entry.kind == "cell" for side in sides for entry in side)
    columns = by or (_columns(sides, without=without) if is_bench else _of_runs(sides))
    split = _split(sides, columns) if is_bench and not by and "scenario" not in without else set()
    entries_by_key: dict[_Key, tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for number, entries in enumerate(sides):
        for entry in entries:
            key = configuration_key(entry, columns)
            full_key = (*key, _part(entry, "scenario")) if key in split else key
            entries_by_key[full_key][number].append(entry)
    if not any(a and b for a, b in entries_by_key.values()):
        raise UsageError(_none_shared(sides, columns))
    chosen = _choice(new_where, ref_where)
    named_by = _naming(entries_by_key.values(), by=columns if not is_bench else by, without=without)
    pairs = []
    counts: Counter[str] = Counter()
    for a, b in entries_by_key.values():
        name = _name((a or b)[0], named_by, chosen)
        counts[name] += 1
        name += f" ({counts[name]})" if counts[name] > 1 else ""
        pairs.append(ConfigurationPair(name, Group(name, tuple(a)), Group(name, tuple(b))))
    return Pairing((*columns, *(["scenario"] if split else [])), tuple(pairs), chosen)


def _of_one_window(
    new: Sequence[Entry], ref: Sequence[Entry]
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Both sides over one kind of window: if kinds differ, recomputed over the training window."""
    kinds = [{e.facts["window"] for e in side if "window" in e.facts} for side in (new, ref)]
    # A training has no window of requests: `fairness` refuses the pair.
    if not all(kinds) or len(set.union(*kinds)) == 1 or {REQUESTS} in kinds:
        return new, ref
    sides = []
    for name, side in zip(_SIDES, (new, ref), strict=True):
        entries, lost = over_one_window(side, TRAINING)
        if lost is not None:
            new_kinds, ref_kinds = (", ".join(sorted(kind)) for kind in kinds)
            raise NotComparable(
                f"{NOT_COMPARABLE}kind of window differs ({ref_kinds} / {new_kinds}), and"
                f" {name}'s {lost.facts.get('id') or 'row'} can't be computed anew"
                f" ({lost.facts.get('path') or 'its directory'} is gone): measure it again"
            )
        sides.append(entries)
    return sides[0], sides[1]


def configuration_key(entry: Entry, columns: Sequence[str]) -> _Key:
    """The values of these columns, each in one spelling: equal for runs of one configuration."""
    return tuple(_part(entry, name) for name in columns)


def _part(entry: Entry, name: str) -> str:
    # Ids stay text: 4e5678901234 would be parsed as infinity.
    return entry.configuration_id if name == _GROUP else spelled(_value(entry, name))


def _value(entry: Entry, name: str) -> object:
    value = entry.settings.get(name)
    return entry.facts.get(name) if value is None else value


def spelled(value: object) -> str:
    """One spelling: 2.00E-05 and 2e-5 are one rate, 1 and 1.0 one number, True and true one."""
    text = fact(value) or ("nan" if isinstance(value, str) and value.lower() == "nan" else "")
    if not _NUMBER.fullmatch(text):
        return text
    return f"{float(text):.15g}"


def _of_runs(sides: _Sides) -> tuple[str, ...]:
    """The column to match runs by: the backend, if all have it and a side has several; or none."""
    backends = [{_part(entry, _BACKEND) for entry in side} for side in sides]
    is_told = all("" not in names for names in backends)
    return (_BACKEND,) if is_told and max(map(len, backends)) > 1 else ()


def _split(sides: _Sides, columns: Sequence[str]) -> set[_Key]:
    """Keys for which a side has several scenarios; none unless both sides name scenarios."""
    if not all(_tells(entries, "scenario") for entries in sides):
        return set()
    keys: set[_Key] = set()
    for entries in sides:
        names: dict[_Key, set[str]] = defaultdict(set)
        for entry in entries:
            names[configuration_key(entry, columns)].add(_part(entry, "scenario"))
        keys |= {key for key, several in names.items() if len(several) > 1}
    return keys


def _check_column(name: str, sides: _Sides) -> None:
    for side, entries in zip(_SIDES, sides, strict=True):
        if not _tells(entries, name):
            columns = [column for column in _column_names(entries) if _tells(entries, column)]
            hint = suggestion(name, columns)
            raise UsageError(
                f"no column {name!r} in {side} to match by; {hint}there are {', '.join(columns)}"
            )


def _none_shared(sides: _Sides, columns: Sequence[str]) -> str:
    """The message if no configuration is on both sides: the columns that differ."""
    apart = {}
    for name in columns:
        new, ref = ({_part(entry, name) for entry in entries} for entries in sides)
        if not new & ref:
            apart[name] = f"{name} is {_some(new)} in NEW and {_some(ref)} in REF"
    left = [name for name in columns if name not in apart]
    why = "; ".join(apart.values()) or f"by {', '.join(columns) or 'no column that both have'}"
    way = f"--by {','.join(left)}" if apart and left else "--by COLUMNS"
    return (
        f"no cell of NEW ({len(sides[0])} rows) is in REF ({len(sides[1])} rows): {why};"
        f" {way} matches by other columns"
    )


def _some(values: set[str]) -> str:
    texts = sorted(value or "not told" for value in values)
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def where(texts: Sequence[str]) -> dict[str, str]:
    """Parse COLUMN=VALUE conditions on a side's rows, such as framework_config=none."""
    conditions = {}
    for text in texts:
        name, is_told, value = text.partition("=")
        if not is_told:
            raise UsageError(f"not COLUMN=VALUE: {text!r}; an example is framework_config=none")
        conditions[name.strip()] = value.strip()
    return conditions


def _chosen(entries: Sequence[Entry], chosen: Mapping[str, str], *, side: str) -> Sequence[Entry]:
    """The entries that meet the conditions."""
    names = {name for entry in entries for name in (*entry.settings, *entry.facts)}
    for name, value in chosen.items():
        if name not in names:
            columns = ", ".join(_column_names(entries))
            raise UsageError(f"no column {name!r} to choose by; there are {columns}")
        matching = [entry for entry in entries if _part(entry, name) == spelled(value)]
        if not matching:
            raise UsageError(
                f"no row of {side} has {name}={value}: {name} is"
                f" {_some({_part(entry, name) for entry in entries})} there"
            )
        entries = matching
    return entries


def _columns(sides: _Sides, *, without: Mapping[str, str]) -> tuple[str, ...]:
    """The configuration's id if both sides share one, else all settings that both have."""
    new, ref = sides
    ids = [{e.configuration_id for e in side if e.configuration_id} for side in sides]
    if not without and ids[0] & ids[1]:
        return (_GROUP,)
    return tuple(
        name
        for name in _setting_names([*new, *ref])
        if name != "scenario" and name not in without and _tells(new, name) and _tells(ref, name)
    )


def _setting_names(entries: Sequence[Entry]) -> list[str]:
    """The settings by which these entries may differ: the usual ones first, the others by name."""
    counts = Counter(name for entry in entries for name in entry.settings)
    usual = [
        name for name in (entries[0].settings if entries else ()) if counts[name] == len(entries)
    ]
    return [*usual, *sorted(set(counts) - set(usual))]


def _column_names(entries: Sequence[Entry]) -> list[str]:
    """The columns to match or choose by: settings of cells; facts of runs, which have none."""
    facts = {name for entry in entries for name in entry.facts} - {"run", "notes", "started"}
    return _setting_names(entries) or sorted(facts)


def _tells(entries: Sequence[Entry], name: str) -> bool:
    return any(_value(entry, name) not in (None, "") for entry in entries)


def _naming(
    groups: Iterable[tuple[Sequence[Entry], Sequence[Entry]]],
    *,
    by: Sequence[str],
    without: Mapping[str, str],
) -> list[str]:
    """The settings that name a configuration: as in a report, or those of `--by`."""
    firsts = [(a or b)[0] for a, b in groups]
    if by:
        return list(by)
    differ = {
        name
        for name in _setting_names(firsts)
        if name not in without and len({_part(entry, name) for entry in firsts}) > 1
    }
    return naming_settings(differ, [entry.settings for entry in firsts])


def _name(entry: Entry, names: Sequence[str], chosen: str) -> str:
    """The configuration's name: settings that vary, else the chosen rows, else its scenario."""
    values = {**entry.facts, **{n: v for n, v in entry.settings.items() if v is not None}}
    last = (configuration_name(values, [name]) for name in _LAST)
    own = "(no settings)" if entry.kind == "cell" else Path(entry.argument).name or entry.argument
    return configuration_name(values, names) or chosen or next(filter(None, last), own)


def _choice(new: Mapping[str, str], ref: Mapping[str, str]) -> str:
    """The chosen rows in words: "mode a against b"."""
    parts = []
    for name in dict.fromkeys((*new, *ref)):
        if name in new and name in ref:
            same = new[name] == ref[name]
            parts.append(f"{name} {new[name]}" + ("" if same else f" against {ref[name]}"))
        else:
            side, value = ("NEW", new[name]) if name in new else ("REF", ref[name])
            parts.append(f"{name} {value} of {side}")
    return ", ".join(parts)


def conditions(pairing: Pairing) -> list[str]:
    """A line for each difference in measuring, with the number of configurations that have it."""
    counts = Counter(line for pair in pairing.both for line in _differences(pair))
    return [
        f"measured differently in {number} of {len(pairing.both)} cells: {line}"
        for line, number in counts.most_common()
    ]


def _differences(pair: ConfigurationPair) -> Iterator[str]:
    """Differences in measuring between the runs of NEW and REF that ended well."""
    names = dict.fromkeys(name for entry in pair.new.ok for name in entry.conditions)
    for name in names:
        new, ref = (
            sorted({value for entry in side.ok if (value := entry.conditions.get(name))})
            for side in (pair.new, pair.ref)
        )
        if new and ref and new != ref:
            yield f"{name} {' and '.join(new)} in NEW, {' and '.join(ref)} in REF"


# The contrast of a pair.

_FEWEST_POOLED = 3


def pair_verdict(
    pair: ConfigurationPair, measured: Metric, scale: Scale, options: CompareOptions
) -> Verdict | None:
    """The contrast of NEW with REF in the first metric that both have, not judged yet.

    None if they have no metric in common, or no contrast on this scale.
    """
    key = pair.common_key(measured)
    if key is None:
        return None
    change = or_none(
        contrast,
        pair.new.numbers(key),
        pair.ref.numbers(key),
        scale=scale,
        confidence=options.confidence,
        noise=options.noise.get(measured.label, options.noise.get("")),
        lenders=_SIDES,
    )
    return None if change is None else Verdict(measured, "differs", "", change, key=key)


def pooled_verdict(verdicts: Sequence[Verdict], options: CompareOptions) -> Verdict | None:
    """The mean change over all configurations; its interval is from the scatter between them."""
    changes = [each.contrast for each in verdicts if each.contrast is not None]
    if len(changes) < _FEWEST_POOLED:
        return None
    news, refs = zip(*(change.means for change in changes), strict=True)
    scale, confidence = changes[0].scale, options.confidence
    change = contrast(news, refs, scale=scale, is_paired=True, confidence=confidence)
    key = ", ".join(sorted({each.key for each in verdicts}))
    return Verdict(verdicts[0].measure, "differs", "", change, key=key)


def why_incomparable(pair: ConfigurationPair, fair: Fairness, measured: Metric) -> str:
    """Why one metric of a pair is not comparable; empty if it is."""
    assumed = [entry for entry in (*pair.new.ok, *pair.ref.ok) if measured.key in entry.assumed]
    why = why_other_terms(pair.ref, pair.new, measured, fair)
    if assumed and not why:
        return f"{assumed[0].source}: {measured.phrase} rests on an assumption"
    return why


# Names of configurations, by the settings in which they differ.


COMMON = (
    *("scenario", "framework_config", "model_name_or_path", "num_gpus", "nodes"),
    *("peft_method", "torch_dtype", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "packing", "max_seq_length", "learning_rate"),
    "effective_batch_size",
)
# Never in a name: the first repeats a setting above, the second follows from other settings.
UNNAMED = ("max_seq_len", "training_data_path")
_BARE = ("scenario", "framework_config", "model_name_or_path", "peft_method", "torch_dtype")
_SHORT = {"num_gpus": "gpus", "per_device_train_batch_size": "batch", "max_seq_length": "length"}


def naming_settings(
    differ: Collection[str], configurations: Iterable[Mapping[str, Any]]
) -> list[str]:
    """The settings that make up a configuration's name, of those that differ."""
    chosen = [name for name in COMMON if name in differ]
    if {"per_device_train_batch_size", "effective_batch_size"} <= set(chosen):
        chosen.remove("effective_batch_size")  # the batch size implies it
    several = list(configurations)
    distinct = {tuple(str(row.get(name)) for name in chosen) for row in several}
    if len(distinct) < len(several):
        chosen += sorted(set(differ) - set(COMMON) - set(UNNAMED))
    return chosen


def configuration_name(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """A configuration's name from these settings; empty if it has none of them."""
    parts = [
        str(row[setting]) if setting in _BARE else f"{_SHORT.get(setting, setting)} {row[setting]}"
        for setting in names
        if row.get(setting) not in (None, "")
    ]
    return ", ".join(parts)


def setting_title(name: str) -> str:
    """A setting's title in the header of a table."""
    return _SHORT.get(name, name).replace("_", " ")


# Padding. transformers counts it in tokens/s, so padding-free training can be faster in samples/s
# and slower in tokens/s. Tokens per sample reveal such padding.


COUNTED = "throughput.computed_tokens_per_s"
_SAMPLES, _TIME = "throughput.samples_per_s", "time.run_s"
# Packing a batch differently moves tokens per sample by a little; padding moves it by much.
_ALIKE = 0.01


def padding_remark(pair: ConfigurationPair) -> str:
    """Explain samples/s and tokens/s that change in opposite ways; empty if they don't."""
    if not counts_differ(pair):
        return ""
    (new_tokens, new_samples), (ref_tokens, ref_samples) = _tokens_and_samples(pair)
    rate, pace = new_tokens / ref_tokens, new_samples / ref_samples
    if (rate - 1.0) * (pace - 1.0) >= 0.0:
        return ""
    each = ref_tokens / ref_samples, new_tokens / new_samples
    fewer, more = sorted(each)
    who = "REF" if each[0] > each[1] else "NEW"
    way, other = ("faster", "slower") if pace > 1.0 else ("slower", "faster")
    return (
        f"{way} by samples/s ({_percent(pace)}{_times(pair)}), yet {other} by tokens/s"
        f" ({_percent(rate)}): tokens/s counts padding. A sample was {significant(each[0], 3)}"
        f" tokens in REF and is {significant(each[1], 3)} in NEW; if the data is the same, at least"
        f" {(1.0 - fewer / more) * 100:.0f} % of what {who} counted was padding. Judge by time,"
        " samples/s or real tokens/s"
    )


def counts_differ(pair: ConfigurationPair) -> bool:
    """True if tokens per sample differ by more than 1 %: tokens/s are then not comparable."""
    each = [tokens / samples for tokens, samples in _tokens_and_samples(pair)]
    return len(each) == 2 and abs(each[0] / each[1] - 1.0) > _ALIKE


def _tokens_and_samples(pair: ConfigurationPair) -> list[tuple[float, float]]:
    """Tokens/s and samples/s of NEW and REF, without a side that lacks one."""
    sides = [(side.mean(COUNTED), side.mean(_SAMPLES)) for side in (pair.new, pair.ref)]
    return [(tokens, samples) for tokens, samples in sides if tokens and samples]


def _percent(ratio: float) -> str:
    return f"{(ratio - 1.0) * 100:+.0f} %"


def _times(pair: ConfigurationPair) -> str:
    ref, new = pair.ref.mean(_TIME), pair.new.mean(_TIME)
    return f", {duration(ref)} to {duration(new)}" if ref and new else ""

"""Is a scenario sound, as far as can be told of all its cells at once?

The trap: an axis that changes nothing. Cells that differ by name only are run as if they were
different, and their noise is read as a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ergmeter.bench.execute import expectations, secrets
from ergmeter.bench.plan import erg_train, fms, templates
from ergmeter.bench.plan import expand as combined
from ergmeter.bench.plan.problems import hint
from ergmeter.bench.plan.scenarios import Scenario, Scenarios
from ergmeter.bench.plan.templates import Template

# -- architectures ---------------------------------------------------------------------------------
# Of which architecture is a model, as far as can be told without loading it?
#
# From its own config.json: in its folder, or in the hub's cache on this machine. Nothing is
# fetched, since a plan must not depend on the network; what is not known is said in the scenarios'
# file.


_BUILTIN = {
    "builtin:tiny": "LlamaForCausalLM",
    "builtin:1b": "LlamaForCausalLM",
    "builtin:tiny-seq2seq": "T5ForConditionalGeneration",
}


@lru_cache(maxsize=1024)
def architecture(model: str) -> str | None:
    """The name of its class, such as LlamaForCausalLM, or None if that is not known here."""
    if model in _BUILTIN:
        return _BUILTIN[model]
    for path in _configs(model):
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, list) and named:
            return str(named[0])
    return None


def _configs(model: str) -> list[Path]:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return [folder / "config.json"]
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    return sorted(snapshots.glob("*/config.json")) if "/" in model else []


# -- sound -----------------------------------------------------------------------------------------


FRAMEWORK = "framework_config"
DATA_PATH = "training_data_path"
_NEAR = 0.8  # FMS's shortnames have much in common


def complaints(
    found: Scenarios, scenario: Scenario, template: Template, axes: Mapping[str, list[Any]]
) -> Iterator[str]:
    """Everything that is wrong with it, a line each."""
    yield from _names(found, scenario, template, axes)
    yield from _values(axes)
    if template.workload == "erg":
        yield from _of_erg_train(scenario, axes)
    for name in scenario.frameworks or ():
        yield from _framework(found, template, name)
    for model in scenario.models if scenario.architectures else ():
        if known_architecture(found, model) is None:
            yield (
                f"the architecture of {model} is not known here; write it under"
                " model_architectures, or fetch its config.json"
            )


def _of_erg_train(scenario: Scenario, axes: Mapping[str, list[Any]]) -> Iterator[str]:
    """What `erg train` has nothing for, where that can be told without its arguments."""
    for name in scenario.axes:
        if name in axes and not erg_train.takes(name):
            yield f"axes: erg train has nothing for {name!r}; {hint(name, erg_train.TAKEN)}"
    for one in scenario.expects:
        name = one.claim.name
        if one.claim.kind == "fact" and name not in expectations.OF_ERG_TRAIN:
            known = hint(name, expectations.OF_ERG_TRAIN)
            yield f"expects {name!r}, which no run of erg train tells; {known}"


def absent_models(scenario: Scenario, template: Template) -> Iterator[str]:
    """Folders of models that are not here: a warning, since a plan may be for another machine."""
    for model in scenario.models if template.workload != "other" else ():
        if model.startswith((".", "/")) and not Path(model).is_dir():
            yield f"scenario {scenario.name!r}: there is no folder {model} here, which is its model"


def known_architecture(found: Scenarios, model: str) -> str | None:
    """What the file says of it, or its own config.json."""
    return found.model_architectures.get(model) or architecture(model)


def _names(
    found: Scenarios, scenario: Scenario, template: Template, axes: Mapping[str, list[Any]]
) -> Iterator[str]:
    known = {*scenario.arguments, *axes, *templates.OF_A_CELL, FRAMEWORK}
    known |= {combined.BATCH, combined.ACCUMULATION, combined.EFFECTIVE}
    known |= {DATA_PATH} if scenario.data is not None else set()
    used = [name for one in (*scenario.include, *scenario.exclude) for name in one]
    used += [name for one in scenario.expects for name in one.when]
    used += [name for one in scenario.constraints for name in sorted(one.names)]
    for name in dict.fromkeys(used):
        if name not in known:
            yield f"{name!r} is no setting of it; {hint(name, sorted(known))}"
    variables = [
        text for one, text in scenario.environment.items() if not secrets.is_key(one, text)
    ]
    texts = [*template.words, *variables]
    named = [one for text in texts for one in templates.unknown(text, {*known, "arguments"})]
    for name in dict.fromkeys(named):
        yield f"{{{name}}} in the command or environment stands for nothing; " + hint(
            name, sorted(known)
        )
    put = " ".join(texts)
    if template.workload == "other":
        yield from _framework_without_effect(found, axes, put)
    if not template.takes_all:
        yield from _axes_without_effect(axes, put)
        yield from _arguments_without_effect(scenario, axes, put)
        if scenario.data_is_own and not takes_data(scenario, template):
            yield (
                f"the command has no {{{DATA_PATH}}} in it, so that data_processing changes nothing"
            )


def takes_data(scenario: Scenario, template: Template) -> bool:
    """Whether a file of the data stage gets to the command."""
    if template.takes_all:
        return True
    put = " ".join((*template.words, *scenario.environment.values()))
    return f"{{{DATA_PATH}}}" in put


def _framework_without_effect(
    found: Scenarios, axes: Mapping[str, list[Any]], put: str
) -> Iterator[str]:
    """A framework is no argument: it has to be named, or be a file in the environment."""
    if f"{{{FRAMEWORK}}}" in put:
        return
    asked = [str(name) for name in axes.get(FRAMEWORK, ()) if name not in (None, fms.NONE)]
    known = {name: found.frameworks.get(name) for name in asked}
    lost = [name for name, one in known.items() if one is None or one.file is None]
    if lost:
        yield (
            f"the command has no {{{FRAMEWORK}}} in it, so that {FRAMEWORK} {', '.join(lost)}"
            " changes nothing"
        )


def _axes_without_effect(axes: Mapping[str, list[Any]], put: str) -> Iterator[str]:
    for name, values in axes.items():
        if len(values) > 1 and name != FRAMEWORK and not _reaches(name, put):
            yield f"the command has no {{{name}}} in it, so that the axis {name} changes nothing"


def _arguments_without_effect(
    scenario: Scenario, axes: Mapping[str, list[Any]], put: str
) -> Iterator[str]:
    single = [name for name, one in axes.items() if len(one) == 1 and one[0] is not None]
    given = [*scenario.arguments, *(name for name in single if name != FRAMEWORK)]
    lost = [name for name in dict.fromkeys(given) if not _reaches(name, put)]
    if lost:
        yield (
            f"the command takes no {', '.join(lost)}: write {{{lost[0]}}} or {{arguments}} into it,"
            " or leave out what has no effect (null removes a default)"
        )


def _reaches(name: str, put: str) -> bool:
    """Whether a setting gets to the command, by itself or by what follows from it."""
    follow = (combined.BATCH, combined.ACCUMULATION) if name == combined.EFFECTIVE else ()
    return name in templates.OF_A_CELL or any(f"{{{one}}}" in put for one in (name, *follow))


def _values(axes: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, values in axes.items():
        for value in values:
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if name in combined.WHOLE and not is_whole:
                yield f"{name} takes whole numbers from 1; got {value!r}"
            elif name == "packing" and not isinstance(value, bool):
                yield f"packing takes true and false; got {value!r}"


def _framework(found: Scenarios, template: Template, name: str) -> Iterator[str]:
    one = found.frameworks.get(name)
    if one is None:
        near = hint(name, found.frameworks, cutoff=_NEAR)
        lacks = "" if found.contents else f"; {_no_contents(found)}"
        yield f"framework_config {name!r} is not known; {near}{lacks}"
    elif template.workload == "erg" and one.tuning is None:
        yield (
            f"framework_config {name!r} is a file of fms-acceleration, which erg train does not"
            " read: --command sft_trainer runs it, or say under framework_configs which backend"
            " stands for it"
        )
    elif template.workload == "sft_trainer" and one.file is None and name != fms.NONE:
        yield (
            f"framework_config {name!r} has no file for sft_trainer: name one of your own under"
            f" framework_configs" + ("" if found.contents else f"; {_no_contents(found)}")
        )


def _no_contents(found: Scenarios) -> str:
    """FMS's shortnames are a file of its own, which may not be where it is looked for."""
    places = " nor ".join(str(at) for at in fms.contents_places(found.path))
    return (
        f"FMS's shortnames are those of its {fms.CONTENTS}, for --command sft_trainer: it is"
        f" neither {places}; put it there, or give --contents"
    )

"""FLOPs of a live model, from its configuration and from which parameters are trained.

A configuration does not describe training: frozen weights and adapters are found from the names and
flags of the model's parameters. This module does not import torch: a model is any object with
`config` and `named_parameters`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter import registry
from ergmeter.errors import ErgmeterError, NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig, head_of
from ergmeter.flops.counted.unsharded import (
    UnshardedParameter,
    sharded_by,
    sizes,
    unsharded_parameters,
)
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.graph.graph import Graph, Node, Trainable
from ergmeter.flops.source import model_graph, read_model
from ergmeter.flops.work import TrainedParts, Work, step_work
from ergmeter.records import Flops
from ergmeter.runlog.settings import Settings

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
_SIZES_ALIKE_FRAC = 0.01
_TRANSPARENT = (
    *("OptimizedModule", "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"),
    "FullyShardedDataParallel",
)
_LIBRARY = "transformers.models."
_ON_EXPERTS = re.compile(r"\.experts(\.base_layer)*\.lora_A\.")
_SOURCE = "the source is taken to be as long as the target"
_INPUTS_ONLY = (
    "pairs that a causal mask keeps apart are left out where attention is a kernel and is told of"
    " it; written out as products it counts whole"
)
_ADAPTER = re.compile(r"^(?P<module>.+)\.lora_A\.[^.]+\.weight$")


def live_flops(
    model: object, seq_len: int | None, settings: Settings
) -> tuple[tuple[Flops, ...], Settings, str]:
    """Return a step's FLOPs under each convention, the settings, and the reason if there are none.

    The settings are completed with the model's parameters and dtype. It does not raise, so that a
    training never fails because of it.
    """
    try:
        work, dtype = model_work(model, seq_len)
    except ErgmeterError as error:
        return _by_running(model, seq_len, settings, str(error))
    filled = replace(
        settings, parameters=settings.parameters or work.params, dtype=settings.dtype or dtype
    )
    return tuple(work.flops.values()), filled, ""


def _by_running(
    model: object, seq_len: int | None, settings: Settings, reason: str
) -> tuple[tuple[Flops, ...], Settings, str]:
    """Count a model without a readable configuration by running a copy of it without memory."""
    if not hasattr(model, "named_parameters"):
        return (), settings, reason
    parameters = unsharded_parameters(model)
    counts = sizes(parameters)
    if counts is not None and counts[0]:
        settings = replace(settings, parameters=settings.parameters or counts[0])
    if seq_len is None:
        return (), settings, reason
    if by := sharded_by(model):
        # On one rank alone it would wait for the others, or count what one of them holds.
        reason = f"{reason} (spread over processes by {by}, it is not run to be counted)"
        return (), settings, reason
    if any(_ON_EXPERTS.search(parameter.name) for parameter in parameters):
        # Run, it would count what PEFT does and not what the model needs.
        reason = "adapters on experts held as one tensor are multiplied into them by PEFT; pass"
        return (), settings, f"{reason} flops=, from `erg flops CONFIG --lora ...,targets=experts`"
    try:
        counted = registry.load("flops", "counted")(model, batch_size=1, seq_len=seq_len)
    except UsageError:
        return (), settings, f"{reason}; to run it, its forward must take one batch of tokens"
    except ErgmeterError as error:
        return (), settings, f"{reason} ({error})"
    why = reason.partition("; pass ")[0]
    reads_source = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    assumptions = (_INPUTS_ONLY, _SOURCE) if reads_source else (_INPUTS_ONLY,)
    flops = Flops(
        model_per_step=counted.needed.model,
        convention="counted",
        engine="counted",
        hardware_per_step=counted.needed.hardware,
        tokens_per_step=seq_len,
        assumptions=(f"run without memory, as model(tokens) alone: {why}", *assumptions),
        not_counted=tuple(line.removeprefix("not counted: ") for line in counted.not_counted),
    )
    filled = replace(
        settings,
        parameters=settings.parameters or counted.params,
        dtype=settings.dtype or dtype_of(parameters),
    )
    return (flops,), filled, ""


def model_work(model: object, seq_len: int | None) -> tuple[Work, str | None]:
    """Return the work of a step of one sequence, and the model's dtype if it is known."""
    if seq_len is None:
        raise UsageError("how long a sequence is was not said: Meter(model=..., seq_len=...)")
    if not hasattr(model, "named_parameters"):
        config = _config(model)
        graph = model_graph(config)
        declared = str(config.raw("dtype") or config.raw("torch_dtype")).rpartition(".")[2]
        return step_work(graph, Batch.of(1, seq_len, facts=graph.facts)), _DTYPES.get(declared)
    inner, assumed = _inside(model)
    if not hasattr(inner, "config"):
        raise NotMeasurable(
            f"a {type(model).__name__} has no configuration to count its FLOPs from;"
            " pass model= the path of a config.json, or flops="
        )
    if any(type(part).__name__ == "CheckpointWrapper" for part in inner.modules()):
        raise NotMeasurable("its layers are wrapped one by one to be checkpointed")
    config = _config(inner.config)
    parameters = unsharded_parameters(model, inner)
    training = _training(parameters)
    if _is_checkpointing(inner):
        training = replace(training, checkpointing="full")
    graph = model_graph(config, architecture=_architecture(inner))
    _check_size(graph, parameters, type(inner).__name__)
    graph = replace(graph, assumptions=(*graph.assumptions, *assumed))
    work = step_work(graph, Batch.of(1, seq_len, facts=graph.facts), training=training)
    return work, dtype_of(parameters)


def _is_checkpointing(model: object) -> bool:
    """True if gradient checkpointing is on; transformers 5.23 renamed the property."""
    new = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if new is None else new)


def _inside(model: Any) -> tuple[Any, tuple[str, ...]]:  # noqa: ANN401  any model
    """Return the model inside its wrappers (compile, DDP, PEFT, trainer), and assumptions of that.

    If one submodule has all parameters, it is taken as the whole model.
    """
    assumptions: tuple[str, ...] = ()
    outermost = model
    while not hasattr(model, "config") or hasattr(model, "get_base_model") or _wrapped(model):
        if hasattr(model, "get_base_model"):  # PEFT's, which passes its base's configuration on
            model = model.get_base_model()
            continue
        if _wrapped(model) is not None:
            model = _wrapped(model)
            continue
        parts = {
            parameter.name.partition(".")[0] for parameter in unsharded_parameters(outermost, model)
        }
        inner = getattr(model, parts.pop(), None) if len(parts) == 1 else None
        if not hasattr(inner, "named_parameters"):
            break
        if hasattr(inner, "config"):
            names = type(inner).__name__, type(model).__name__
            assumptions = ("a step is one pass through the {} inside the {}".format(*names),)
        model = inner
    return model, assumptions


def _wrapped(model: Any) -> Any:  # noqa: ANN401
    """Return the model inside torch.compile, DDP, FSDP or DeepSpeed; None for another model."""
    if type(model).__name__ not in _TRANSPARENT:
        return None
    return getattr(model, "_orig_mod", None) or getattr(model, "module", None)


def _architecture(model: Any) -> str | None:  # noqa: ANN401
    """Return a model's transformers class, or the one that the user's class is derived from.

    None if the class's name means no head, but the model has output embeddings.
    """
    own = (kind for kind in type(model).__mro__ if kind.__module__.startswith(_LIBRARY))
    name = next(own, type(model)).__name__
    has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
    return None if head_of(name) == "bare" and has_head else name


def _check_size(graph: Graph, parameters: list[UnshardedParameter], kind: str) -> None:
    """Raise NotMeasurable if the number of parameters does not match the configuration.

    That is a model that was changed after it was built. Adapters are not counted. Nothing is
    checked if packed weights hide the number.
    """
    added = (".lora_", "modules_to_save")
    counts = sizes([p for p in parameters if not any(name in p.name for name in added)])
    if counts is None:
        return
    params, _ = counts
    if abs(params - graph.params) > _SIZES_ALIKE_FRAC * graph.params:
        raise NotMeasurable(
            f"the {kind} has {params:,} parameters and its configuration describes"
            f" {graph.params:,}; pass flops=, or model= the path of a config.json that fits"
        )


def _config(model: object) -> ModelConfig:
    if isinstance(model, str | Path):
        return read_model(str(model))
    if isinstance(model, dict):
        return ModelConfig(model, where="the configuration given")
    if hasattr(model, "to_dict"):
        return ModelConfig(model.to_dict(), where=type(model).__name__)
    raise UsageError(
        f"model= takes a model of transformers, its configuration or the path of a config.json;"
        f" got {type(model).__name__}"
    )


def _training(parameters: list[UnshardedParameter]) -> TrainedParts:
    """Return which parts are trained, from the names and flags of the parameters."""
    ranks: dict[str, int] = {}
    for parameter in parameters:
        match = _ADAPTER.match(parameter.name)
        if match and parameter.shape:
            ranks[match["module"]] = parameter.shape[0]
    if ranks:
        if len(set(ranks.values())) > 1:
            raise NotMeasurable("its adapters have several ranks")
        if any(each.requires_grad and ".lora_" not in each.name for each in parameters):
            raise NotMeasurable("more than its adapters is trained")
        dora = any(".lora_magnitude_vector" in parameter.name for parameter in parameters)
        return TrainedParts(lora=Lora(max(ranks.values()), tuple(ranks), is_dora=dora))
    if all(parameter.requires_grad for parameter in parameters):
        return TrainedParts()
    return TrainedParts(trains=_as_flagged(parameters))


def _as_flagged(parameters: list[UnshardedParameter]) -> Trainable:
    """Return a test of nodes: trained if a parameter of the node (else of its layer) is."""
    flags: dict[str, bool] = {}
    for parameter in parameters:
        words = parameter.name.split(".")
        for length in range(1, len(words) + 1):
            prefix = ".".join(words[:length])
            flags[prefix] = flags.get(prefix, False) or parameter.requires_grad

    def trains(node: Node) -> bool:
        name = node.name
        while name and name not in flags:
            name = name.rpartition(".")[0]
        return flags.get(name, False)

    return trains


def dtype_of(parameters: list[UnshardedParameter]) -> str | None:
    """Return bf16 or fp16 if the weights show it; None for fp32, whose products may be shorter."""
    short = {_DTYPES[parameter.dtype] for parameter in parameters if parameter.dtype in _DTYPES}
    return short.pop() if len(short) == 1 else None

"""Reads the model that a user names, and builds its graph.

A model is a config.json, a model's directory, a name on the Hugging Face hub, or dimensions such as
`hidden=4096,layers=32`. Nothing is downloaded: a name is looked up in the hub's local cache.

Without `type=`, the dimensions choose the family. Missing values are listed as assumptions. A
dimension that the family does not read is an error: `experts=8` would not change a dense model.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError, closest, suggestion
from ergmeter.flops.config import MissingFieldError, ModelConfig, defaults_of, read_config
from ergmeter.flops.estimate.saved_activations import traits
from ergmeter.flops.families import DECODERS
from ergmeter.flops.families.encoders import ENCODERS, SEQ2SEQ, encoder_graph, seq2seq_graph
from ergmeter.flops.families.vision import (
    IMAGES,
    LANGUAGE_ALONE,
    VISION,
    ImageSize,
    language_alone,
    vision_language_graph,
)
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.graph.heads import with_head
from ergmeter.flops.graph.layers import decoder_graph

# The graph of a configuration, of any family.


class UnknownArchitectureError(FormatError):
    """Unsupported `model_type`. `said` is the message without the advice after it."""

    def __init__(self, where: str, message: str, *, instead: str = "") -> None:
        self.said = message
        advice = instead or (
            "if its layers are like a known family's, put that in model_type"
            " (llama, qwen3, mixtral, gpt2, ...), or pass its dimensions:"
            " hidden=...,layers=...,heads=...,ffn=...,vocab=..."
        )
        super().__init__(f"{where}: {message}; {advice}")


_RUN = "`erg flops MODEL --engine counted` runs it, where transformers is installed"
_LIVE = "a Meter counts the live model as it runs: pass it as model="
# Known families of transformers without a reader: the reason, and what to do instead.
_NOT_READ_FOR = (
    ("its attention layers share one block's weights, each with adapters of its own", _RUN,
     ("zamba", "zamba2")),
    ("a learned index picks the keys that each query meets", _RUN,
     ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")),
    ("its kind of layers is not supported", _RUN,
     ("rwkv", "xlstm", "reformer", "xlnet", "deberta")),
    ("some of its layers attend to images", _LIVE, ("mllama",)),
    ("it is several models that hear, think and speak", _LIVE, ("qwen2_5_omni", "qwen3_omni_moe")),
    ("it reads sound, at several rates", _LIVE,
     ("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "seamless_m4t")),
    ("it reads images, by other layers than a ViT's", _LIVE,
     ("resnet", "convnext", "convnextv2", "efficientnet", "mobilevit", "swin", "swinv2", "beit",
      "segformer", "timm_wrapper", "detr", "sam", "sam2", "blip", "blip-2")),
)  # fmt: skip
NOT_READ = {
    family: (reason, instead) for reason, instead, families in _NOT_READ_FOR for family in families
}


def model_graph(
    config: ModelConfig, *, image_size: ImageSize | None = None, architecture: str | None = None
) -> Graph:
    """Return the graph of the model that a configuration describes.

    `architecture` is the model's class, which decides the head; by default the first of the
    configuration's `architectures`. `image_size`, height and width in pixels, is for vision towers
    that take images of any size. Raises FormatError for an unknown family.
    """
    kind = config.model_type
    if image_size is not None:
        _check_size(config, image_size)
    listed = config.names("architectures")
    name = architecture or (listed[0] if listed else None)
    if kind in DECODERS:
        graph = decoder_graph(DECODERS[kind](config))
    elif kind in ENCODERS:
        graph = encoder_graph(ENCODERS[kind](config))
    elif kind in SEQ2SEQ:
        graph = seq2seq_graph(SEQ2SEQ[kind](config))
    elif kind in VISION:
        graph = vision_language_graph(VISION[kind](config, image_size))
    elif kind in LANGUAGE_ALONE:
        graph = language_alone(config)
    elif kind in IMAGES:
        graph = IMAGES[kind](config, image_size, name or "")
    else:
        raise _unknown(config)
    if kind not in IMAGES:
        graph = with_head(graph, config, name)
    return replace(
        graph,
        assumptions=(*graph.assumptions, *config.assumptions),
        facts=graph.facts | _learned_positions(graph, config),
        traits=traits(config),
    )


def _learned_positions(graph: Graph, config: ModelConfig) -> dict[str, int]:
    """Return the longest sequence that the table of learned positions allows; {} without one."""
    if not any(node.role == "positions" and node.stream == "tokens" for node in graph):
        return {}
    names = ("n_positions", "max_position_embeddings", "max_target_positions", "max_seq_len")
    positions = config.maybe(*names)
    if positions is None:
        return {}
    return {"learned_positions": positions - _NEVER_USED if graph.family in _PADDED else positions}


# Their first two rows are unused: positions start after the padding index.
_PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet", "esm", "data2vec-text")
_NEVER_USED = 2


def known_families() -> list[str]:
    """Return every `model_type` that has a reader."""
    return sorted((*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION, *IMAGES, *LANGUAGE_ALONE))


def _check_size(config: ModelConfig, image_size: ImageSize) -> None:
    if config.model_type not in (*VISION, *IMAGES):
        raise UsageError(f"{config.where}: this model takes no images; leave out --image-size")
    if any(isinstance(length, bool) or length < 1 for length in image_size):
        raise UsageError(f"image size: a height and a width in pixels, 1 or more; got {image_size}")


def _unknown(config: ModelConfig) -> FormatError:
    kind = config.model_type
    if not kind:
        return FormatError(
            f"{config.where}: the field model_type is missing; add it (llama, qwen3, ...)"
        )
    if kind in NOT_READ:
        reason, instead = NOT_READ[kind]
        return UnknownArchitectureError(
            config.where, f"{kind} can't be counted from its configuration: {reason}",
            instead=instead,
        )  # fmt: skip
    hint = suggestion(kind, known_families(), " (is it {}?)", cutoff=0.8)
    return UnknownArchitectureError(config.where, f"the architecture {kind!r} is not known{hint}")


# Finding and reading the configuration.

# The short names of dimensions, and the fields of a config.json.
_SHORT = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "window": "sliding_window",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
    "type": "model_type",
}


def read_graph(
    model: str, *, image_size: ImageSize | None = None, further: int | None = None
) -> Graph:
    """Return the graph of a model: a path, a hub name, or `hidden=4096,layers=32,heads=32,...`.

    `further`: the number of multi-token prediction layers to count.
    """
    config = read_model(model)
    if further is not None:
        config = config.having("mtp_num_layers", further)
    try:
        graph = model_graph(config, image_size=image_size)
    except FormatError as error:
        if config.where != _TYPED:
            raise
        raise UsageError(_dimension_error(config, error)) from error
    if further and not any(".mtp." in node.name for node in graph):
        raise UsageError(
            f"{config.where}: multi-token prediction is not supported for this family;"
            " leave out --mtp"
        )
    return graph


def read_model(model: str) -> ModelConfig:
    """Return a configuration from a path, dimensions (name=value), or a cached hub model."""
    if not Path(model).exists():
        if "=" in model:
            return _typed(model)
        if _HUB_NAME.fullmatch(model):
            return _downloaded(model)
    return read_config(model)


_TYPED = "the dimensions given"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.json)")


def _downloaded(name: str) -> ModelConfig:
    """Return the configuration of a hub model from the local download cache."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    revision = folder / "refs" / "main"
    try:
        path = folder / "snapshots" / revision.read_text("utf-8").strip() / "config.json"
    except OSError:
        path = None
    if path is None or not path.is_file():
        local = name.rpartition("/")[2]
        raise UsageError(
            f"{name}: no such file, and its config.json is not in the local cache; fetch it with"
            f" `hf download {name} config.json --local-dir {local}` and pass {local}"
        )
    return read_config(path)


def _hub_cache() -> Path:
    """Return huggingface_hub's download folder, from the library's environment variables."""
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub_cache:
        return Path(hub_cache).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "hub"


def _dimension_error(config: ModelConfig, error: FormatError) -> str:
    """Return the message of an error in dimensions, with their short names (hidden, layers)."""
    typed = {field: short for short, field in _SHORT.items()}
    if isinstance(error, UnknownArchitectureError):
        return (
            f"{_TYPED}: {error.said}; leave type out for Llama's layers, or take a similar family"
            " (qwen3, mixtral, gpt2, ...)"
        )
    if not isinstance(error, MissingFieldError):
        return re.sub(r"\w+", lambda word: typed.get(word[0], word[0]), str(error))
    wanted = [typed.get(name, name) for name in _missing(config, error)]
    example = ",".join(f"{name}=..." for name in wanted)
    verb = "is" if len(wanted) == 1 else "are"
    return f"{_TYPED}: {', '.join(wanted)} {verb} missing; add {example}"


def _missing(config: ModelConfig, first: MissingFieldError) -> list[str]:
    """Return all missing fields, found one by one: fill in a placeholder and read again."""
    fields, names = config.fields, [first.names[0]]
    for _ in _SHORT:
        fields[names[-1]] = _PLACEHOLDER
        try:
            model_graph(ModelConfig(fields, where=_TYPED, defaults=_not_sizes(config.model_type)))
        except MissingFieldError as error:
            names.append(error.names[0])
        except ErgmeterError:  # the placeholder does not fit; the names so far are right
            break
        else:
            break
    return names


_PLACEHOLDER = 64


def _typed(text: str) -> ModelConfig:
    """Return the configuration of `hidden=4096,layers=32,...`; chooses the family if not named."""
    fields = _dimensions(text)
    gated = fields.pop(_GATED, None)
    if gated is not None and not isinstance(gated, bool):
        raise UsageError(f"{_TYPED}: gated must be true or false; got {gated!r}")
    assumed = []
    defaults: dict[str, Any] = {}
    if "model_type" not in fields:
        fields["model_type"] = _family(fields, gated=gated)
        if "num_attention_heads" in fields:  # of Mistral's class in transformers the default is 8
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        assumed.append(_style(fields, gated=gated))
    elif gated is not None:
        raise UsageError(
            f"{_TYPED}: gated does not go with type={fields['model_type']}, which decides that;"
            " leave out gated"
        )
    else:
        defaults = _not_sizes(fields["model_type"])
    other = _FEED_FORWARD.get(fields["model_type"])
    if other and "intermediate_size" in fields:
        fields[other] = fields.pop("intermediate_size")
    config = ModelConfig(fields, where=_TYPED, defaults=defaults, assumed=assumed)
    _check_used(config)
    return config


def _not_sizes(kind: object) -> dict[str, Any]:
    """Return a family's defaults for fields that are not sizes: sizes must be given."""
    return {
        name: value
        for name, value in defaults_of(str(kind)).items()
        if name in ("head_dim", "sliding_window_pattern") or isinstance(value, bool | str)
    }


_GATED = "gated"
# Families with another field name for the inner size of the feed-forward.
_FEED_FORWARD = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), "n_inner"),
    "opt": "ffn_dim",
    "falcon": "ffn_hidden_size",
}
_MIXTURE = ("num_local_experts", "num_experts_per_tok")


def _family(fields: dict[str, Any], *, gated: bool | None) -> str:
    """Return the family for dimensions without `type`: by gate, experts and window."""
    is_mixture = any(name in fields for name in _MIXTURE)
    has_window = "sliding_window" in fields
    if gated is False and (is_mixture or has_window):
        raise UsageError(
            f"{_TYPED}: gated=false can't be combined with experts or window: name the family"
            " with type= (starcoder2 has a window and no gate)"
        )
    if gated is False:
        return "arcee"  # Llama with a feed-forward of two matrices
    return "mixtral" if is_mixture else "mistral" if has_window else "llama"


def _style(fields: dict[str, Any], *, gated: bool | None) -> str:
    """Return the assumption line for what the dimensions leave open: gate, head, biases."""
    kind = fields["model_type"]
    feed = "experts" if kind == "mixtral" else "feed-forward"
    gate = "without a gate (2 matrices)" if gated is False else "with a gate (3 matrices)"
    head = "tied" if fields.get("tie_word_embeddings") else "untied"
    biases = "" if any("bias" in name for name in fields) else ", no biases"
    others = "gated=false, tied=true or " if kind == "llama" else ""
    return (
        f"{'Mixtral' if kind == 'mixtral' else 'Llama'}-style layers: {feed} {gate}, {head}"
        f" head{biases}; {others}type=gpt2, type=qwen3, ... for others"
    )


def _check_used(config: ModelConfig) -> None:
    """Raise UsageError for a dimension that this family does not read."""
    try:
        model_graph(config)
    except ErgmeterError:  # `read_graph` reports it
        return
    for name in config.fields:
        if name in _NO_SIZES or name in config.read or _is_of_code(config, name):
            continue
        typed = next((short for short, field in _SHORT.items() if field == name), name)
        family = config.model_type
        other = _FAMILIES_WITH.get(name)
        near = closest(typed, (*_SHORT, *config.read), cutoff=0.8)
        switch = _SWITCHES.get(name)
        if switch in config.read and switch not in config.fields:
            advice = f"add {switch}=true to switch it on"
        elif other and other != family:
            advice = f"type={other} is one that uses it"
        elif near and near != typed:
            advice = f"did you mean {near}?"
        else:
            advice = "leave it out, or name the family that has it with type="
        raise UsageError(f"{_TYPED}: {typed} has no effect in the family {family}; {advice}")


_SWITCHES = {"sliding_window": "use_sliding_window"}
# Of the weights' storage, or the name of the family itself.
_NO_SIZES = ("model_type", "torch_dtype")
_FAMILIES_WITH = {
    "sliding_window": "mistral",
    **dict.fromkeys(_MIXTURE, "mixtral"),
    **dict.fromkeys(("num_experts", "moe_intermediate_size"), "qwen3_moe"),
    **dict.fromkeys(
        ("n_routed_experts", "n_shared_experts", "kv_lora_rank", "q_lora_rank",
         "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        "deepseek_v3",
    ),
}  # fmt: skip


def _is_of_code(config: ModelConfig, name: str) -> bool:
    """True if a field changes the model's code (`ActivationTraits`), and so the memory estimate."""
    without = {field: value for field, value in config.fields.items() if field != name}
    return traits(ModelConfig(without, where=_TYPED)) != traits(config)


def _dimensions(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"{word!r} must be name=value, as in hidden=4096,layers=32,heads=32")
        if name not in (*_SHORT, _GATED) and "_" not in name:
            names = (*_SHORT, _GATED)
            hint = suggestion(name, names, "did you mean {}?") or f"there are {', '.join(names)}"
            raise UsageError(f"no dimension {name!r}; {hint} (or a field of a config.json)")
        fields[_SHORT.get(name, name)] = _value(value)
    return fields


def _value(text: str) -> Any:  # noqa: ANN401  a number, a boolean or a string
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    return text

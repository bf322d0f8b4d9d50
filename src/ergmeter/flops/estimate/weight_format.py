"""What a model's configuration says its weights are kept in: its type, its quantisation.

The trap: a method we do not know taken for 16 bits. Its bytes are then two to four times too many,
and a bandwidth too good to be true; so it is an error that asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.config import EXPERTS, ModelConfig, shown_value
from ergmeter.flops.estimate.storage import CACHED, KEPT, WIDE, Storage, StoredType, kept_as

if TYPE_CHECKING:
    from collections.abc import Callable

_QUANTISED = "quantization_config"
# Fields by which modules are chosen or treated apart: GPTQModel's, optimum's, auto-round's. Where
# one says something, what the matrices are kept in does not follow from the rest.
_APART = ("modules_in_block_to_quantize", "inside_layer_modules", "dynamic", "extra_config")
_LEFT_ALONE = (
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers"),
    "exclude_modules",
)


def storage_of(
    config: ModelConfig, *, weights: str | None = None, cache: str | None = None
) -> Storage:
    """How a model is kept: as it is asked for, else as its configuration says.

    FormatError where the configuration names a way of quantising that is not known. A type that
    somebody asks for goes where its method puts it: mxfp4 on experts, where the model has some.
    """
    rest, whose = _own_type(config)
    fields = _raw(config, _QUANTISED)
    quantised = ModelConfig(fields, where=f"{config.where}: {_QUANTISED}") if fields else None
    left_alone = _left_alone(quantised) if quantised else ()
    parts: tuple[str, ...] = ()
    if weights is not None:
        matrices, source = kept_as(weights), "--weights-dtype"
    elif quantised is not None and (found := _quantised(quantised)) is not None:
        matrices, source = found, f"the config's {_QUANTISED}"
    else:
        matrices, source = rest, whose
    is_by_transformers = weights is not None or _method(quantised) == "mxfp4"
    if matrices == KEPT["mxfp4"] and is_by_transformers and _has_experts(config):
        parts = ("experts",)  # which it converts alone
    if matrices.bits >= WIDE:
        rest = matrices
    cached, cache_source = _cache(quantised, cache, rest)
    return Storage(
        matrices,
        rest,
        cached,
        left_alone,
        parts,
        (
            *_words(matrices, source, rest, whose, parts),
            f"cache in {cached.name} ({cache_source})",
        ),
    )


def _has_experts(config: ModelConfig) -> bool:
    """Whether the model, or a part of it, is a mixture of experts."""
    parts = (config.fields, *(part for part in config.fields.values() if isinstance(part, dict)))
    return any(part.get(name) for part in parts for name in EXPERTS)


def _words(
    matrices: StoredType, source: str, rest: StoredType, whose: str, parts: tuple[str, ...]
) -> tuple[str, ...]:
    if matrices == rest:
        return (f"weights in {matrices.said} ({source})",)
    what, others = "matrices", "head, embeddings, norms and modules not converted"
    if parts:
        what, others = ", ".join(parts), "all other weights"
    return f"{what} in {matrices.said} ({source})", f"{others} in {rest.name} ({whose})"


def _raw(config: ModelConfig, name: str) -> dict[str, Any]:
    """An object of the configuration, or of its language model's."""
    inner = config.raw("text_config")
    found = config.raw(name) or (inner.get(name) if isinstance(inner, dict) else None)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FormatError(f"{config.where}: {name} must be an object; got {shown_value(found)}")
    return found


def _own_type(config: ModelConfig) -> tuple[StoredType, str]:
    """What is not quantised is kept in, and who says so."""
    inner = config.raw("text_config")
    for fields in (config.fields, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            said = fields.get(name)
            if said is None:
                continue
            try:
                return kept_as(str(said).rpartition(".")[2]), f"the config's {name}"
            except UsageError:
                continue
    return KEPT["bf16"], "assumed, the config names no type"


def _left_alone(quantised: ModelConfig) -> tuple[str, ...]:
    return tuple(name for field in _LEFT_ALONE for name in quantised.names(field) or ())


def _cache(
    quantised: ModelConfig | None, asked: str | None, rest: StoredType
) -> tuple[StoredType, str]:
    if asked is not None:
        return kept_as(asked, known=CACHED), "--cache-dtype"
    if quantised is not None:
        scheme = quantised.raw("kv_cache_scheme")
        algorithm = quantised.raw("kv_cache_quant_algo")
        if (isinstance(scheme, dict) and scheme.get("num_bits") == 8) or algorithm == "FP8":
            return CACHED["fp8"], f"the config's {_QUANTISED}"
    return replace(rest, scale_bits=0), "the type of weights that are not quantised"


def _quantised(said: ModelConfig) -> StoredType | None:
    """What the matrices are kept in; None where they are not quantised at all."""
    read = _METHODS.get(_method(said))
    if read is None:
        method = said.word("quant_method") or "of no name"
        raise FormatError(
            f"{said.where}: what weights take under quant_method {method!r} is not"
            " known; pass --weights-dtype"
        )
    for field in (*_APART, "lm_head"):
        if said.raw(field):
            raise _not_understood(said, field)
    return read(said)


def _method(said: ModelConfig | None) -> str:
    if said is None:
        return ""
    is_bitsandbytes = "load_in_4bit" in said or "load_in_8bit" in said
    named = said.word("quant_method") or ("bitsandbytes" if is_bitsandbytes else "")
    return named.lower().replace("-", "_")


def _not_understood(said: ModelConfig, field: str) -> FormatError:
    return FormatError(
        f"{said.where}: which weights are kept how does not follow from {field}"
        f" {shown_value(said.raw(field))}; pass --weights-dtype"
    )


def _bitsandbytes(said: ModelConfig) -> StoredType | None:
    if said.flag("load_in_4bit", "_load_in_4bit", default=False):
        double = said.flag("bnb_4bit_use_double_quant", default=False)
        return KEPT["nf4-double" if double else "nf4"]
    return KEPT["int8"] if said.flag("load_in_8bit", "_load_in_8bit", default=False) else None


def _grouped(said: ModelConfig) -> StoredType:
    """AWQ and GPTQ: a scale and a zero for each group."""
    bits = said.whole("bits", "w_bit")
    size = said.raw("group_size") if "group_size" in said else said.raw("q_group_size")
    group = None if size in (None, -1) else said.whole("group_size", "q_group_size")
    return StoredType(f"int{bits}", bits, 16 + bits, group)


def _auto_round(said: ModelConfig) -> StoredType:
    if said.raw("data_type") not in (None, "int"):
        raise _not_understood(said, "data_type")
    return _grouped(said)


def _fp8(said: ModelConfig) -> StoredType:
    block = said.wholes("weight_block_size")
    if not block:
        return KEPT["fp8"]
    if len(block) != 2 or not all(block):
        raise FormatError(
            f"{said.where}: weight_block_size must be two sizes; got {shown_value(block)}"
        )
    return StoredType("fp8", 8, 32, block[0] * block[1])


def _modelopt(said: ModelConfig) -> StoredType | None:
    algorithm = said.word("quant_algo")
    if algorithm is None:
        return None
    known = {"FP8": KEPT["fp8"], "NVFP4": KEPT["nvfp4"]}
    if algorithm not in known:
        raise FormatError(
            f"{said.where}: what weights take under quant_algo {algorithm!r} is not known; pass"
            " --weights-dtype"
        )
    return known[algorithm]


def _compressed(said: ModelConfig) -> StoredType | None:
    """compressed-tensors: groups of modules, of which all must be kept alike."""
    _check_dense(said)
    groups = said.raw("config_groups")
    found = {
        _group(ModelConfig(group, where=said.where), said.word("format"))
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    }
    if len(found) > 1:
        raise FormatError(
            f"{said.where}: modules are quantised in {len(found)} ways, of which one is"
            " understood; pass --weights-dtype"
        )
    return found.pop() if found else None


def _check_dense(said: ModelConfig) -> None:
    """Refuse zeros that are left out of the file."""
    sparsity = said.raw("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _not_understood(said, "sparsity_config")


def _group(said: ModelConfig, format_of_all: str | None) -> StoredType:
    if said.raw("targets") != ["Linear"]:
        raise _not_understood(said, "targets")
    if (said.word("format") or format_of_all) == "mxfp4-pack-quantized":
        return KEPT["mxfp4"]
    return _scheme(ModelConfig(said.raw("weights"), where=f"{said.where}: weights"))


def _scheme(said: ModelConfig) -> StoredType:
    bits = said.whole("num_bits")
    kind = "fp" if said.word("type") == "float" else "int"
    name = f"{kind}{bits}"
    strategy = said.word("strategy")
    if strategy == "tensor_group":  # NVIDIA's: a scale in 8 bits, and one for all of them
        return StoredType(f"nv{name}", bits, 8, said.whole("group_size"))
    if strategy == "tensor":
        return StoredType(name, bits)
    if strategy == "block":
        high, wide = (said.wholes("block_structure") or [128, 128])[:2]
        return StoredType(name, bits, 32, max(1, high * wide))
    zero = 0 if said.flag("symmetric", default=True) else bits
    group = None if strategy == "channel" else said.whole("group_size")
    return StoredType(name, bits, 16 + zero, group)


_METHODS: dict[str, Callable[[ModelConfig], StoredType | None]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _grouped,
    "awq": _grouped,
    "auto_round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _said: StoredType("fp8", 8, 32),
    "mxfp4": lambda _said: KEPT["mxfp4"],
    "modelopt": _modelopt,
    "compressed_tensors": _compressed,
}

"""Bytes of stored weights: bits per weight with scales, from an option or from the configuration.

Each group of weights has a scale, so nf4 takes 4.5 bits a weight, or 4.127 with quantised scales,
AWQ and GPTQ 4.16, mxfp4 4.25. Only the matrices inside layers are quantised. Head and embedding
mostly stay in 16 bits, which is two fifths of the bytes of Qwen2.5-7B-AWQ.

Products may use another type: 4-bit weights are unpacked and multiplied in bf16.

An unknown quantisation method is an error. Counting it as 16 bits would give two to four times too
many bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.config import EXPERTS, ModelConfig, quoted_value
from ergmeter.flops.graph.graph import Graph, Linear, Node

WIDE = 16  # a type of this many bits or more applies to the whole model, not only to matrices


@dataclass(frozen=True, slots=True)
class StoredType:
    """A data type of stored weights, with the size of its scales."""

    name: str
    bits: int
    scale_bits: int = 0  # of the scale and zero point of each group of weights
    group: int | None = None  # weights per group; None: all weights of an output

    def bits_in(self, work: Linear) -> float:
        """Return the bits per weight of a matrix, scales included."""
        return self.bits + self.scale_bits / (self.group or work.inputs)

    def matrix_bytes(self, work: Linear, number_bytes: float) -> float:
        """Return the bytes of a matrix and its bias, whose elements take `number_bytes` each."""
        weights = work.inputs * work.outputs * work.copies
        return weights * self.bits_in(work) / 8 + (work.params - weights) * number_bytes

    @property
    def text(self) -> str:
        """The type's name, its bits per weight and its scales as text."""
        if not self.scale_bits:
            return f"{self.name}, {self.bits} bits"
        scales = f"{self.scale_bits} bits of scaling data for each"
        if self.group is None:
            return f"{self.name}, {self.bits} bits, and {scales} output"
        each = self.bits + self.scale_bits / self.group
        return f"{self.name}, {each:.4g} bits: {self.bits}, and {scales} {self.group} weights"


# bitsandbytes: a 32-bit scale per 64 weights, or an 8-bit scale with a 32-bit scale per 256 of
# them (QLoRA, arXiv 2305.14314); int8 has a 32-bit scale per output (arXiv 2208.07339). AWQ and
# GPTQ: a 16-bit scale and a zero point as wide as a weight per group, mostly of 128 weights.
# Microscaling types: an 8-bit scale per 32 weights (OCP MX 1.0); NVIDIA's per 16.
STORED_TYPES = {
    each.name: each
    for each in (
        StoredType("fp32", 32),
        StoredType("bf16", 16),
        StoredType("fp16", 16),
        StoredType("fp8", 8),
        StoredType("int8", 8, 32),
        StoredType("nf4", 4, 32, 64),
        StoredType("nf4-double", 4, 8 * 256 + 32, 64 * 256),
        StoredType("int4", 4, 16 + 4, 128),
        StoredType("mxfp4", 4, 8, 32),
        StoredType("nvfp4", 4, 8, 16),
    )
}
# Types of a KV cache. Their scales are not counted: at most one per head.
_UNSCALED = ("fp32", "bf16", "fp16", "fp8", "int8")
CACHED = {name: replace(STORED_TYPES[name], scale_bits=0) for name in _UNSCALED}
_LONG = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp4": "nvfp4"}


def stored_type(name: str, *, types: dict[str, StoredType] = STORED_TYPES) -> StoredType:
    """Return the type of this name, ours or torch's. Raises UsageError for another name."""
    short = _LONG.get(name.lower(), name.lower())
    if short not in types:
        raise UsageError(f"no type {name!r} for stored numbers; there are {', '.join(types)}")
    return types[short]


@dataclass(frozen=True, slots=True)
class Storage:
    """The types in which a model's weights and cache are stored."""

    matrices: StoredType  # inside layers
    rest: StoredType  # head, embeddings, norms, biases, and matrices that are not converted
    cache: StoredType
    left_alone: tuple[str, ...] = ()  # name patterns of modules that are not quantised
    parts: tuple[str, ...] = ()  # the parts of the model that are quantised; none: all
    notes: tuple[str, ...] = ()  # how weights and cache are stored, and the source

    def held_bytes(self, node: Node) -> float:
        """Return the bytes of a node's weights; for a tied matrix, of the shared weights."""
        work = node.work
        if not isinstance(work, Linear):
            return node.params * self.rest.bits / 8
        stored = self.matrices if self._is_quantised(node) else self.rest
        return stored.matrix_bytes(work, self.rest.bits / 8)

    def total_bytes(self, graph: Graph) -> float:
        """Return the bytes of all weights, tied ones once: the size of a checkpoint."""
        return sum(
            node.params * self.rest.bits / 8 if node.tied_to else self.held_bytes(node)
            for node in graph
            if node.params
        )

    def _is_quantised(self, node: Node) -> bool:
        if self.matrices.bits >= WIDE:
            return True
        is_other_part = self.parts and node.part not in self.parts
        if node.role or node.part in ("router", "lora") or is_other_part:
            return False
        return not any(_means(pattern, node.name) for pattern in self.left_alone)


def _means(pattern: str, name: str) -> bool:
    """True if the name pattern of an excluded module matches this node or a module around it."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    words = ".*".join(re.escape(word) for word in pattern.split("*"))
    return re.search(rf"(^|\.){words}(\.|$)", name) is not None


def plain(name: str, *, source: str) -> Storage:
    """Return a storage with weights and cache in one type; `source` says where it comes from."""
    stored = stored_type(name)
    return Storage(stored, stored, stored, notes=(f"weights and cache in {stored.text}: {source}",))


ASSUMED = plain("bf16", source="assumed, no type is given")


# The storage that a configuration declares: its type, its quantisation.

_QUANTISED = "quantization_config"
# Fields that treat some modules differently (GPTQModel, optimum, auto-round). If one is set, the
# other fields do not determine the type of every matrix.
_APART = ("modules_in_block_to_quantize", "inside_layer_modules", "dynamic", "extra_config")
_LEFT_ALONE = (
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers"),
    "exclude_modules",
)


def storage_of(
    config: ModelConfig, *, weights: str | None = None, cache: str | None = None
) -> Storage:
    """Return the types of a model's weights and cache: as passed, else as its config declares.

    Raises FormatError if the config declares an unknown quantisation method. A type that is passed
    applies where its method applies it: mxfp4 to the experts only, if the model has experts.
    """
    rest, whose = _own_type(config)
    fields = _raw(config, _QUANTISED)
    quantised = ModelConfig(fields, where=f"{config.where}: {_QUANTISED}") if fields else None
    left_alone: tuple[str, ...] = ()
    if quantised:
        left_alone = tuple(name for field in _LEFT_ALONE for name in quantised.names(field) or ())
    parts: tuple[str, ...] = ()
    if weights is not None:
        matrices, source = stored_type(weights), "--weights-dtype"
    elif quantised is not None and (stored := _quantised(quantised)) is not None:
        matrices, source = stored, f"the config's {_QUANTISED}"
    else:
        matrices, source = rest, whose
    is_by_transformers = weights is not None or _method(quantised) == "mxfp4"
    if matrices == STORED_TYPES["mxfp4"] and is_by_transformers and _has_experts(config):
        parts = ("experts",)  # transformers' mxfp4 converts nothing else
    if matrices.bits >= WIDE:
        rest = matrices
    cached, cache_source = _cache(quantised, cache, rest)
    notes = _words(matrices, source, rest, whose, parts)
    notes += (f"cache in {cached.name} ({cache_source})",)
    return Storage(matrices, rest, cached, left_alone, parts, notes)


def declared_method(config: ModelConfig) -> str | None:
    """Return the quantisation method that a configuration declares, or None."""
    fields = _raw(config, _QUANTISED)
    method = _method(ModelConfig(fields, where=config.where))
    return (method or fields.get("quant_algo") or "no method named") if fields else None


def _has_experts(config: ModelConfig) -> bool:
    """True if the model, or a part of it, is a mixture of experts."""
    parts = (config.fields, *(part for part in config.fields.values() if isinstance(part, dict)))
    return any(part.get(name) for part in parts for name in EXPERTS)


def _words(
    matrices: StoredType, source: str, rest: StoredType, whose: str, parts: tuple[str, ...]
) -> tuple[str, ...]:
    if matrices == rest:
        return (f"weights in {matrices.text} ({source})",)
    what, others = "matrices", "head, embeddings, norms and modules not converted"
    if parts:
        what, others = ", ".join(parts), "all other weights"
    return f"{what} in {matrices.text} ({source})", f"{others} in {rest.name} ({whose})"


def _raw(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return a field that is a JSON object, from the config or its `text_config`; {} if absent."""
    inner = config.raw("text_config")
    value = config.raw(name) or (inner.get(name) if isinstance(inner, dict) else None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{config.where}: {name} must be an object; got {quoted_value(value)}")
    return value


def _own_type(config: ModelConfig) -> tuple[StoredType, str]:
    """Return the type of weights that are not quantised, and where it comes from."""
    inner = config.raw("text_config")
    for fields in (config.fields, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            dtype = fields.get(name)
            if dtype is None:
                continue
            try:
                return stored_type(str(dtype).rpartition(".")[2]), f"the config's {name}"
            except UsageError:
                continue
    return STORED_TYPES["bf16"], "assumed, the config names no type"


def _cache(
    quantised: ModelConfig | None, asked: str | None, rest: StoredType
) -> tuple[StoredType, str]:
    if asked is not None:
        return stored_type(asked, types=CACHED), "--cache-dtype"
    if quantised is not None:
        scheme = quantised.raw("kv_cache_scheme")
        algorithm = quantised.raw("kv_cache_quant_algo")
        if (isinstance(scheme, dict) and scheme.get("num_bits") == 8) or algorithm == "FP8":
            return CACHED["fp8"], f"the config's {_QUANTISED}"
    return replace(rest, scale_bits=0), "the type of weights that are not quantised"


def _quantised(quantization: ModelConfig) -> StoredType | None:
    """Return the type of the quantised matrices, or None if the fields quantise nothing."""
    read = _METHODS.get(_method(quantization))
    if read is None:
        method = quantization.word("quant_method") or ""
        raise FormatError(
            f"{quantization.where}: quant_method {method!r} is not known; pass --weights-dtype"
        )
    for field in (*_APART, "lm_head"):
        if quantization.raw(field):
            raise _not_understood(quantization, field)
    return read(quantization)


def _method(quantization: ModelConfig | None) -> str:
    if quantization is None:
        return ""
    is_bitsandbytes = "load_in_4bit" in quantization or "load_in_8bit" in quantization
    named = quantization.word("quant_method") or ("bitsandbytes" if is_bitsandbytes else "")
    return named.lower().replace("-", "_")


def _not_understood(quantization: ModelConfig, field: str) -> FormatError:
    return FormatError(
        f"{quantization.where}: {field} {quoted_value(quantization.raw(field))} does not show"
        " the type of every weight; pass --weights-dtype"
    )


def _bitsandbytes(quantization: ModelConfig) -> StoredType | None:
    if quantization.flag("load_in_4bit", "_load_in_4bit", default=False):
        double = quantization.flag("bnb_4bit_use_double_quant", default=False)
        return STORED_TYPES["nf4-double" if double else "nf4"]
    is_8bit = quantization.flag("load_in_8bit", "_load_in_8bit", default=False)
    return STORED_TYPES["int8"] if is_8bit else None


def _grouped(quantization: ModelConfig) -> StoredType:
    """AWQ, GPTQ and AutoRound: a scale and a zero point per group of weights."""
    if _method(quantization) == "auto_round" and quantization.raw("data_type") not in (None, "int"):
        raise _not_understood(quantization, "data_type")
    bits = quantization.integer("bits", "w_bit")
    size = quantization.raw("group_size" if "group_size" in quantization else "q_group_size")
    group = None if size in (None, -1) else quantization.integer("group_size", "q_group_size")
    return StoredType(f"int{bits}", bits, 16 + bits, group)


def _fp8(quantization: ModelConfig) -> StoredType:
    block = quantization.integers("weight_block_size")
    if not block:
        return STORED_TYPES["fp8"]
    if len(block) != 2 or not all(block):
        raise FormatError(
            f"{quantization.where}: weight_block_size must be two sizes; got {quoted_value(block)}"
        )
    return StoredType("fp8", 8, 32, block[0] * block[1])


def _modelopt(quantization: ModelConfig) -> StoredType | None:
    algorithm = quantization.word("quant_algo")
    if algorithm is None:
        return None
    formats = {"FP8": STORED_TYPES["fp8"], "NVFP4": STORED_TYPES["nvfp4"]}
    if algorithm not in formats:
        raise FormatError(
            f"{quantization.where}: quant_algo {algorithm!r} is not known; pass --weights-dtype"
        )
    return formats[algorithm]


def _compressed(quantization: ModelConfig) -> StoredType | None:
    """compressed-tensors: groups of modules, which must all have the same type."""
    sparsity = quantization.raw("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _not_understood(quantization, "sparsity_config")  # the file omits zeros
    groups = quantization.raw("config_groups")
    schemes = {
        _group(ModelConfig(group, where=quantization.where), quantization.word("format"))
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    }
    if len(schemes) > 1:
        raise FormatError(
            f"{quantization.where}: modules are quantised in {len(schemes)} ways, and only one way"
            " for all is supported; pass --weights-dtype"
        )
    return schemes.pop() if schemes else None


def _group(quantization: ModelConfig, format_of_all: str | None) -> StoredType:
    if quantization.raw("targets") != ["Linear"]:
        raise _not_understood(quantization, "targets")
    if (quantization.word("format") or format_of_all) == "mxfp4-pack-quantized":
        return STORED_TYPES["mxfp4"]
    return _scheme(ModelConfig(quantization.raw("weights"), where=f"{quantization.where}: weights"))


def _scheme(quantization: ModelConfig) -> StoredType:
    bits = quantization.integer("num_bits")
    kind = "fp" if quantization.word("type") == "float" else "int"
    name = f"{kind}{bits}"
    strategy = quantization.word("strategy")
    if strategy == "tensor_group":  # NVIDIA's: a scale in 8 bits, and one for all of them
        return StoredType(f"nv{name}", bits, 8, quantization.integer("group_size"))
    if strategy == "tensor":
        return StoredType(name, bits)
    if strategy == "block":
        high, wide = (quantization.integers("block_structure") or [128, 128])[:2]
        return StoredType(name, bits, 32, max(1, high * wide))
    zero = 0 if quantization.flag("symmetric", default=True) else bits
    group = None if strategy == "channel" else quantization.integer("group_size")
    return StoredType(name, bits, 16 + zero, group)


_METHODS: dict[str, Callable[[ModelConfig], StoredType | None]] = {
    "bitsandbytes": _bitsandbytes,
    **dict.fromkeys(("gptq", "awq", "auto_round"), _grouped),
    "fp8": _fp8,
    "fbgemm_fp8": lambda _quantization: StoredType("fp8", 8, 32),
    "mxfp4": lambda _quantization: STORED_TYPES["mxfp4"],
    "modelopt": _modelopt,
    "compressed_tensors": _compressed,
}

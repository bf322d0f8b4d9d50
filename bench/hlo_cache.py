"""Makes what bench/hlo.py reads: a compiler's cache in Neuron's layout, 374 modules of 270 MB.

One module copied 374 times would stay in the processor's cache, and every reader would look alike.
Here are training steps and forward passes of Llama-shaped models of 1 to 300 layers,
made by jax as it hands them to a compiler, of 29 kB to 14 MB; each is there several times with a
name of its own, as a cache holds a graph for each shape it was compiled for. Every second base has
NKI kernels in place of its exponentials.

The sizes follow public caches: most modules small, a few of several MB. Made once and kept.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import hlo_schema

VERSION = "1"
MODULES, TOTAL_BYTES = 374, 270_000_000
COMPILER = "neuronxcc-2.21.33363.0+82129205"
# layers, backward too, share of the bytes
BASES = (
    (300, True, 0.27),
    (140, True, 0.24),
    (64, True, 0.20),
    (32, True, 0.12),
    (96, False, 0.08),
    (16, True, 0.04),
    (8, True, 0.03),
    (1, False, 0.02),
)
NKI = "AwsNeuronCustomNativeKernel"
MIB = 1 << 20


def ready() -> Path:
    """The folder, made at the first call."""
    folder = Path(tempfile.gettempdir()) / f"ergmeter-bench-hlo-{VERSION}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        bases = [_base(layers, backward=backward) for layers, backward, _ in BASES]
        bases[1::2] = map(_with_kernels, bases[1::2])
        _write_cache(folder / "cache" / COMPILER, bases)
        _write_others(folder, bases[0])
        (folder / "ready").touch()
    return folder


def _write_cache(folder: Path, bases: list[bytes]) -> None:
    counts = [max(1, round(TOTAL_BYTES * s / len(b))) for (*_, s), b in zip(BASES, bases)]  # noqa: B905
    counts[-1] += MODULES - sum(counts)
    for base, count in zip(bases, counts, strict=True):
        for copy in range(count):
            _write_module(folder, base, copy)


def _write_module(folder: Path, base: bytes, copy: int) -> None:
    # The last of two names counts, so this one replaces jax's.
    name = f"SyncTensorsGraph.{copy}".encode()
    data = base + bytes([10, len(name)]) + name
    digest = hashlib.sha256(data).hexdigest()
    entry = folder / f"MODULE_{int(digest[:16], 16):020d}+{digest[-8:]}"
    entry.mkdir(parents=True)
    (entry / "model.hlo_module.pb").write_bytes(data)
    (entry / "compile_flags.json").write_text('["--model-type=transformer"]')
    (entry / "model.neff").write_bytes(b"\0" * 4096)
    (entry / "model.done").touch()


def _write_others(folder: Path, base: bytes) -> None:
    (folder / "large.pb").write_bytes(base)
    (folder / "large.pb.gz").write_bytes(gzip.compress(base, 6))
    # In field 3 of a module a computation, in its field 2 an instruction, in its field 8 a literal.
    literal = _delimited(8, bytes(range(256)) * (MIB // 256 * 200))
    row = _delimited(1, b"constant") + _delimited(2, b"constant") + _delimited(8, literal)
    rows = b"".join(_delimited(2, row + b"\x98\x02" + bytes([place])) for place in (1, 2))  # id
    lonely = _delimited(1, b"weights") + rows + b"\x28\x63\x30\x02"  # id 99, root 2
    with (folder / "literals.pb").open("wb") as file:
        file.write(_base(1, backward=False))
        file.write(_delimited(3, lonely))


def _delimited(number: int, data: bytes) -> bytes:
    length, size = bytearray(), len(data)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + data


def _with_kernels(data: bytes) -> bytes:
    module = hlo_schema.module_class().FromString(data)
    keys = {"func_name": "flash_fwd", "kernel_version": 1, "mac_count": 1 << 20}
    keys["klir_binary"] = {"binary": "x" * 400}
    config = base64.b64encode(json.dumps(keys).encode())
    for computation in module.computations:
        for row in computation.instructions:
            if row.opcode == "exponential":
                row.opcode, row.custom_call_target, row.backend_config = "custom-call", NKI, config
    made: bytes = module.SerializeToString()
    return made


def _base(layers: int, *, backward: bool) -> bytes:
    """A Llama-shaped model, layer after layer, as jax hands it to a compiler."""
    jax: Any = import_module("jax")
    loss, weights, tokens = _llama(layers)
    function = jax.value_and_grad(loss) if backward else loss
    lowered = jax.jit(function).lower(weights, tokens)
    made: bytes = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return made


def _llama(layers: int) -> tuple[Callable[..., Any], Any, Any]:
    jax: Any = import_module("jax")  # typed in part only
    jnp = jax.numpy
    width, heads, feed, words, length = 512, 8, 1408, 4096, 128
    shapes = {
        "q": (width, width),
        "k": (width, width // 2),
        "v": (width, width // 2),
        "o": (width, width),
        "gate": (width, feed),
        "up": (width, feed),
        "down": (feed, width),
        "first": (width,),
        "second": (width,),
    }

    def array(*shape: int) -> Any:  # noqa: ANN401
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def norm(x: Any, w: Any) -> Any:  # noqa: ANN401
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * w

    def turned(x: Any) -> Any:  # noqa: ANN401
        half = x.shape[-1] // 2
        angle = jnp.arange(length)[:, None] / 10_000.0 ** (jnp.arange(half) / half)
        sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def attention(x: Any, w: Any) -> Any:  # noqa: ANN401
        def split(name: str) -> Any:  # noqa: ANN401
            y = x @ w[name]
            return y.reshape(*y.shape[:2], -1, width // heads).transpose(0, 2, 1, 3)

        q, k, v = turned(split("q")), turned(split("k")), split("v")
        k, v = (jnp.repeat(part, heads // part.shape[1], axis=1) for part in (k, v))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
        return y.transpose(0, 2, 1, 3).reshape(x.shape) @ w["o"]

    def loss(weights: Any, tokens: Any) -> Any:  # noqa: ANN401
        x = weights["table"][tokens]
        for w in weights["layers"]:
            x = x + attention(norm(x, w["first"]), w)
            y = norm(x, w["second"])
            x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        logits = (x @ weights["table"].T).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    layer = {name: array(*shape) for name, shape in shapes.items()}
    weights = {"table": array(words, width), "layers": [layer] * layers}
    return loss, weights, jax.ShapeDtypeStruct((2, length), jnp.int32)

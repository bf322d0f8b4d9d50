"""Bytes of all storages that are alive, at every operation: what an allocator would count.

A dispatch mode sees each tensor that torch makes, and a weak reference when its storage goes. With
fake tensors nothing is computed or allocated, so an 8B model takes seconds. Autograd, checkpointing
and optimizers are torch's own, and so is the order in which they free. Temporaries inside a kernel
and the workspaces of cuBLAS are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK = 512  # torch's CUDA allocator rounds up to this
MAKE: dict[str, dict[str, Any]] = {
    "adamw-fused": {"fused": True},
    "adamw": {"foreach": True},
    "adamw-loop": {"foreach": False},
}


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages that are alive, and the most that there were in each phase."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.now = 0
        self.phase = ""
        self.peaks: dict[str, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self.references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.now += self.sizes[key]
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
        del self.references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return result


@contextmanager
def unpacked() -> Iterator[None]:
    """Tensors without values: transformers can't see in them that no sequence is packed."""
    masking: Any = transformers.masking_utils
    original = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda _: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original


def step_peaks(
    config: Any,
    sequences: int,
    length: int,
    *,
    checkpointed: bool = False,
    optimizer: str = "adamw-fused",
    output: str = "freed",
    attention: str = "sdpa",
) -> dict[str, int]:
    """Peaks of the second step of a training in bf16: forward, backward, optimizer."""
    live = LiveStorages()
    make: Any = transformers.AutoModelForCausalLM
    with unpacked(), FakeTensorMode(allow_non_fake_inputs=True), live:
        model = make.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        model.train()
        if checkpointed:
            model.config.use_cache = False
            model.gradient_checkpointing_enable()
        params = model.parameters()
        updates = (
            torch.optim.SGD(params, lr=0.1)
            if optimizer == "sgd"
            else torch.optim.AdamW(params, **MAKE[optimizer])
        )
        tokens = torch.zeros((sequences, length), dtype=torch.long)
        result = None
        for _ in range(2):
            live.peaks = {}
            live.phase = "forward"
            if output == "freed":
                loss = model(input_ids=tokens, labels=tokens).loss
            else:
                result = model(input_ids=tokens, labels=tokens)
                loss = result.loss
            live.phase = "backward"
            loss.backward()
            if output == "until-step":
                result = None
            live.phase = "optimizer"
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            updates.step()
            updates.zero_grad()
        del result
    return live.peaks

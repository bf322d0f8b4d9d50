"""Labelled positions of each step, where the loss is given the labels and the model is not.

A loss that has the output projection may apply it to labelled positions alone, as torchtune's
LinearCrossEntropyLoss does. Their number differs between steps, and the FLOPs with it. So the calls
of such a loss are counted over the whole training, not in the recorded steps alone.

The pitfall: a loss without products (nn.CrossEntropyLoss) looks the same. It is let go after the
first backward pass, so that ordinary loops pay nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from ergmeter.integrations.batches import Amount, Counts, is_ids, is_later, labelled
from ergmeter.integrations.device_fetch import now_on
from ergmeter.integrations.torch.roots import is_captured

if TYPE_CHECKING:
    from torch import nn

_CALL = "_compiled_call_impl"  # where torch looks first when a module is called
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_backward_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class LossLabels:
    """Counts the labels that one loss module is given, from its first call to `detach`."""

    def __init__(self) -> None:
        self.module: ref[nn.Module] | None = None
        self._amounts: list[Amount] = []  # of the step in progress, one for each call
        self._call: Any = None
        self._is_over = False

    @property
    def is_active(self) -> bool:
        """Whether a loss is counted."""
        return self._call is not None

    def look_at(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count this module's calls, the present one included, if it is a loss with labels."""
        if self._is_over or (self.module is not None and self.module() is module):
            return
        if _labels((*args, *kwargs.values())) is None:
            return
        if self.module is not None or module.__dict__.get(_CALL) is not None:
            self.detach()  # two losses: which positions bear one is unknown; or one is compiled
            return
        self.module = ref(module)
        self._call = self._counted_call(module)
        module.__dict__[_CALL] = self._call

    def decide(self, *, has_products: bool) -> None:
        """After a backward pass: whether its products may depend on the labels."""
        module = self.module() if self.module is not None else None
        if module is not None and not has_products and next(module.parameters(), None) is None:
            self.detach()

    def detach(self) -> None:
        """Count no more, and leave no trace on the module."""
        module = self.module() if self.module is not None else None
        if module is not None and module.__dict__.get(_CALL) is self._call is not None:
            module.__dict__.pop(_CALL)
        self._call, self._amounts, self._is_over = None, [], True

    def merged(self, counts: list[Counts], after: Any) -> tuple[list[Counts], Any]:  # noqa: ANN401
        """The counts of a step with its labelled positions, where one loss belongs to each batch.

        `after` is what `now_on` returned for these counts.
        """
        amounts, self._amounts = self._amounts, []
        if len(amounts) != len(counts) or any(one.loss is not None for one in counts):
            return counts, after
        found = [replace(one, loss=amount) for one, amount in zip(counts, amounts, strict=True)]
        later = now_on([one for one in amounts if is_later(one)])
        return found, {**(after or {}), **later} if later else after

    def _counted_call(self, module: nn.Module) -> Any:  # noqa: ANN401
        to = ref(module)

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            called = to()
            assert called is not None
            if self._call is call and not _is_compiling():
                try:
                    self._count((*args, *kwargs.values()))
                except Exception:  # noqa: BLE001  never break training
                    self.detach()
            return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        return call

    def _count(self, values: tuple[Any, ...]) -> None:
        if not _is_grad_enabled() or _backward_task() != -1:
            return  # evaluation, or computed again for the backward pass
        if is_captured():
            self.detach()  # replays of a CUDA graph are not seen
            return
        labels = _labels(values)
        self._amounts.append(None if labels is None else labelled(labels))


def _labels(values: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The labels among these values, one for each row of what is differentiated; else None."""
    rows = {
        one.numel() // one.shape[-1]
        for one in values
        if isinstance(one, torch.Tensor) and one.requires_grad and one.dim() > 1 and one.shape[-1]
    }
    found = [one for one in values if isinstance(one, torch.Tensor) and is_ids(one)]
    return found[0] if len(found) == 1 and rows == {found[0].numel()} else None

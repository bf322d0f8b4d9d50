"""One open step. Our only code that runs on the training thread, so it does next to nothing.

Entering takes a timestamp last and leaving takes one first: what we cost lies outside the step.
"""

from __future__ import annotations

from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.meter.clock import ON_DEVICE, moment

if TYPE_CHECKING:
    from types import TracebackType

    from ergmeter.meter.meter import Meter


class StepSpan:
    """A step between its start and its end. Set its attributes at any time before the end."""

    __slots__ = (
        "_meter",
        "_start_ns",
        "_thread",
        "grad_norm",
        "learning_rate",
        "loss",
        "micro_steps",
        "phase",
        "samples",
        "tokens",
        "tokens_loss",
        "tokens_real",
    )

    def __init__(
        self,
        meter: Meter,
        phase: str,
        tokens: int | None,
        samples: int | None,
        tokens_real: int | None,
        tokens_loss: int | None,
    ) -> None:
        self._meter = meter
        self.phase = phase
        self.tokens = tokens
        self.samples = samples
        self.tokens_real = tokens_real
        self.tokens_loss = tokens_loss
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.grad_norm: float | None = None
        self.micro_steps = 0

    def micro_step(
        self,
        tokens: int | None = None,
        *,
        samples: int | None = None,
        tokens_real: int | None = None,
        tokens_loss: int | None = None,
    ) -> None:
        """Count a micro-batch of gradient accumulation. Its tokens add to the step's."""
        self.micro_steps += 1
        self.tokens = _plus(self.tokens, tokens)
        self.samples = _plus(self.samples, samples)
        self.tokens_real = _plus(self.tokens_real, tokens_real)
        self.tokens_loss = _plus(self.tokens_loss, tokens_loss)

    def __enter__(self) -> StepSpan:
        spans = self._meter._spans
        thread = get_ident()
        if thread in spans:
            raise UsageError(
                f"a {self.phase} span was opened inside an open {spans[thread].phase} span;"
                " close the first before the second (gradient accumulation: span.micro_step)"
            )
        spans[thread] = self
        self._thread = thread
        self._start_ns = moment() if self.phase in ON_DEVICE else monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_ns = moment() if self.phase in ON_DEVICE else monotonic_ns()
        meter = self._meter
        thread = self._thread  # a generator may be closed in another than it was entered in
        meter._spans.pop(thread, None)
        meter._ends_ns[thread] = end_ns
        if kind is None:
            meter._append(
                (
                    self._start_ns,
                    end_ns,
                    next(meter._numbers[self.phase]),
                    1,
                    self.phase,
                    self.tokens,
                    self.tokens_real,
                    self.tokens_loss,
                    self.samples,
                    self.micro_steps or 1,
                    self.loss,
                    self.learning_rate,
                    self.grad_norm,
                )
            )
        else:
            meter.mark("step_failed", f"{self.phase}: {kind.__name__}")


def _plus(total: int | None, more: int | None) -> int | None:
    if more is None:
        return total
    return more if total is None else total + more

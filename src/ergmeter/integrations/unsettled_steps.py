"""Steps that are over, held until the numbers that belong to them are here.

A count or a loss may still lie on a device, and a loss is often logged after its step. The trap:
asking for it at once, which makes the training wait for the device. So a step is held as little
more than its times, and whoever hands over, on another thread, asks for the numbers of many.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ergmeter.integrations.batches import Counts, is_later
from ergmeter.integrations.device_fetch import Fetch, now_on
from ergmeter.records import Step

Brief: TypeAlias = "Step | tuple[int, int, int, int]"  # start, end, index, micro-steps
Row: TypeAlias = "tuple[Brief, list[Counts], Any]"  # and what `now_on` says of what is on a device

_LOSSES = ("loss", "train_loss", "train/loss")
_RATES = ("learning_rate", "lr")
_NORMS = ("grad_norm", "gradient_norm", "grad_norm_total")
_FIRST = 8  # steps whose labelled positions are kept one by one
_FIGURES = ("loss", "learning_rate", "grad_norm")


class UnsettledSteps:
    """The steps of one training that wait, in order."""

    def __init__(self, pass_on: Callable[[Step], None]) -> None:
        """`pass_on` is given each step once it is complete."""
        self.rows: deque[Row] = deque()
        self.seen = TokenSums()
        self._pass_on = pass_on
        self._fetch: tuple[Fetch, list[Row]] | None = None
        self._settling = threading.Lock()

    def extend(self, end_ns: int) -> None:
        """The newest step lasts longer than was told."""
        if self.rows:
            step, counts, after = self.rows.pop()
            self.rows.append((replace(_full_step(step), end_ns=end_ns), counts, after))

    def complete(self, logged: Mapping[str, Any], last: Step | None) -> None:
        """What was logged of the newest step, if it is the one that is meant."""
        if not logged or not self.rows:
            return
        newest, counts, after = self.rows[-1]
        if newest is last or isinstance(newest, tuple):
            far = [value for value in logged.values() if is_later(value)]
            after = {**(after or {}), **(now_on(far) or {})}
            self.rows[-1] = (_with_logged(_full_step(newest), logged), counts, after)

    def settle(self, *, wait: bool) -> None:
        """Pass on the steps whose numbers are known; ask for those of the others."""
        with self._settling:
            while self._settled(wait=wait):
                pass

    def _settled(self, *, wait: bool) -> bool:
        """Whether there may be more to pass on."""
        if self._fetch is not None:
            fetch, waiting = self._fetch
            if not (wait or fetch.is_here):
                return False
            self._fetch = None
            self._give(waiting, fetch.values())
        # The newest may still be told a loss, which is logged after its end.
        ready = [self.rows.popleft() for _ in range(len(self.rows) - (not wait))]
        if not ready:
            return False
        laters = [later for step, counts, _ in ready for later in _laters(step, counts)]
        if laters:
            newest = {device: one for _, _, after in ready for device, one in (after or {}).items()}
            self._fetch = (Fetch(laters, newest).start(), ready)
        else:
            self._give(ready, [])
        return True

    def _give(self, rows: list[Row], values: list[float]) -> None:
        known = iter(values)
        for step, counts, _ in rows:
            settled = [one.settled([next(known) for _ in one.laters]) for one in counts]
            far = [name for name in _FIGURES if is_later(getattr(step, name, None))]
            if far:
                told: dict[str, Any] = {name: next(known) for name in far}
                step = replace(_full_step(step), **told)
            self.seen.add(settled)
            self._pass_on(_with_tokens(_full_step(step), settled))


@dataclass
class TokenSums:
    """The tokens of all steps so far, as far as attention makes a difference of their lengths."""

    computed: int = 0
    real: int = 0
    squares: int = 0
    loss: int | None = 0  # None: unknown in some step
    first_losses: list[int | None] = field(default_factory=list)  # of each of the first steps

    def add(self, step: list[Counts]) -> None:
        """The batches of one step, all numbers known."""
        known = [one for one in step if one.computed is not None]
        for one in known:
            computed = one.computed or 0
            self.computed += computed
            self.real += computed if one.real is None else int(one.real)
            self.squares += int(one.squares or 0)
        loss = _total([one.loss for one in known]) if known else None
        self.loss = _total([self.loss, loss])
        if len(self.first_losses) < _FIRST:
            self.first_losses.append(loss)

    @property
    def length(self) -> float:
        """How long the sequence of a token is, on the average of all tokens."""
        return self.squares / self.real


def _laters(step: Brief, counts: list[Counts]) -> list[Any]:
    """What of a step is still on a device: its counts, then what was logged of it."""
    figures = [getattr(step, name, None) for name in _FIGURES]
    return [
        *(later for one in counts for later in one.laters),
        *(one for one in figures if is_later(one)),
    ]


def _full_step(step: Brief) -> Step:
    """A step that was held as little more than its times."""
    if isinstance(step, Step):
        return step
    start_ns, end_ns, index, micro_steps = step
    return Step(start_ns, end_ns, index, micro_steps=micro_steps)


def _with_tokens(step: Step, counts: list[Counts]) -> Step:
    if not counts:
        return step
    return replace(
        step,
        tokens_computed=_total([one.computed for one in counts]),
        tokens_real=_total([one.real for one in counts]),
        tokens_loss=_total([one.loss for one in counts]),
        samples=_total([one.samples for one in counts]),
    )


def _total(amounts: list[Any]) -> int | None:
    return None if any(one is None for one in amounts) else sum(amounts)


def _with_logged(step: Step, logged: Mapping[str, Any]) -> Step:
    def first(names: tuple[str, ...], now: float | None) -> Any:  # noqa: ANN401
        return now if now is not None else next((logged[n] for n in names if n in logged), None)

    return replace(
        step,
        loss=first(_LOSSES, step.loss),
        learning_rate=first(_RATES, step.learning_rate),
        grad_norm=first(_NORMS, step.grad_norm),
    )

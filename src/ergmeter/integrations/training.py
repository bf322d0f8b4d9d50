"""One training that a framework runs, told to a Meter: what every integration calls.

An integration knows when its framework begins a step, hands over a batch, evaluates or saves; it
says so here and computes nothing. Two promises are kept in this one place. The training thread
pays for timestamps, shapes and, on a device, for two small reductions that nobody waits for. And
whatever goes wrong in here is a mark in the run and the end of the telling, never of the training.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import ref

from ergmeter.flops.live import must_be_run
from ergmeter.integrations.batches import Counts, counted, is_later
from ergmeter.integrations.fetching import Fetch, now_on
from ergmeter.integrations.world import training_identity
from ergmeter.meter import Meter, measuring
from ergmeter.meter.opening import say
from ergmeter.records import Mark, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ergmeter.records import Phase

_MOST_HELD = 1_000_000  # steps that wait for numbers of a device: then it does not answer
_Held: TypeAlias = "Step | tuple[int, int, int, int]"  # start, end, index, micro-steps
_Called = TypeVar("_Called", bound="Callable[..., Any]")
# FLOPs are counted again at the end if sequences were this much longer or shorter than the first.
_LENGTHS_ALIKE_FRAC = 0.01
_DESCRIBE_S = 10.0  # at most, at the end of a training that was shorter
_TOO_MANY = f"the device has not said what {_MOST_HELD} steps held: it does not answer"
_LOSSES = ("loss", "train_loss", "train/loss")
_FIGURES = ("loss", "learning_rate", "grad_norm")
_RATES = ("learning_rate", "lr")
_NORMS = ("grad_norm", "gradient_norm", "grad_norm_total")


def _guarded(method: _Called) -> _Called:
    """Our failure becomes a mark, and this training is told no further."""

    @wraps(method)
    def call(self: Training, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if self.failed:
            return None
        try:
            return method(self, *arguments, **options)
        except Exception as error:  # noqa: BLE001  never break training
            self._fail(error)
            return None

    return cast("_Called", call)


class Training:
    """A training from its first step to its last. Any thread of the process may call it."""

    def __init__(self, meter: Meter | None = None, **options: Any) -> None:  # noqa: ANN401
        """`meter` is used if given, else one that measures already, else one made of `options`."""
        self._own = Meter(**options) if meter is None else None
        # Unasked, from the hook of `erg record`: whoever else measures goes first.
        self._looks_on = self._own is not None and self._own.looks_on
        self._given = meter
        self.meter: Meter | None = None
        self.failed = False
        self._model: Callable[[], object] = _nothing  # not held: its memory is the program's
        self._shifts = True
        self._start_ns: int | None = None
        self._counts: list[Counts] = []
        self._unknown = False  # a micro-batch of this step without tokens: their sum isn't known
        self._held: deque[tuple[_Held, list[Counts], Any]] = deque()
        self._fetch: tuple[Fetch, list[tuple[_Held, list[Counts], Any]]] | None = None
        self._index = 0
        self._seen = Seen()
        self._told_length = 0.0
        self._is_padded = False
        self._logged: dict[str, Any] = {}
        self._last: Step | None = None
        self._describing: threading.Thread | None = None
        self._to_run = 0  # how long a sequence is, of a model that must be run to be counted
        self._pid = 0
        self._no_flops = ""
        self._settling = threading.Lock()

    # -- life -----------------------------------------------------------------------------------

    @_guarded
    def begin(self, model: object = None, *, first_step: int = 0) -> None:
        """The training begins, or goes on after `first_step` steps."""
        if self.meter is not None:
            return
        if not self._looks_on:
            measuring.make_way()
        others = measuring.meters()
        if others and self._looks_on:
            self.failed = True  # somebody tells what goes on here already
            return
        self.meter = self._given or (others[0] if others else self._own)
        assert self.meter is not None
        if self.meter not in others:
            self.meter.start()
        self._pid = os.getpid()
        self._model = _weakly(model)
        self._shifts = shifts_labels(model)
        self._index = first_step
        assert self.meter._handover is not None
        self.meter._handover.sources.append(self._settle)
        atexit.register(self._exit)
        if self._looks_on:
            measuring.gives_way(self._give_way)

    def end(self, ended: str | None = None) -> None:
        """The training is over. A Meter of our own is closed with it, whatever went wrong."""
        meter = self.meter
        if meter is None or os.getpid() != self._pid:  # in a forked child it is the parent's
            return
        atexit.unregister(self._exit)
        measuring.keeps_way(self._give_way)
        self.catch_up()
        handover = meter._handover
        if handover is not None and self._settle in handover.sources:
            handover.sources.remove(self._settle)
        self.meter = None
        if meter is self._own:
            meter.close(ended)

    # -- what a framework says --------------------------------------------------------------------

    @_guarded
    def step_begin(self) -> None:
        """A training step begins, unless one is under way."""
        if self._start_ns is None:
            self._let_go()
            self._start_ns = time.monotonic_ns()

    @_guarded
    def batch(self, batch: object) -> None:
        """A micro-batch of the step under way: what the model is given."""
        counts = counted(batch, shifts=self._shifts)
        if counts is None:
            self._unknown = True
            return
        self._counts.append(counts)

    @_guarded
    def step_end(
        self,
        *,
        micro_steps: int | None = None,
        loss: Any = None,  # noqa: ANN401  a number, or what a framework holds one in
        learning_rate: float | None = None,
        grad_norm: Any = None,  # noqa: ANN401
    ) -> None:
        """The optimizer has stepped. What was logged later (`logged`) still reaches this step."""
        end_ns = time.monotonic_ns()
        if self._start_ns is None:
            return
        start_ns, self._start_ns = self._start_ns, None
        counts, self._counts = self._counts, []
        is_unknown, self._unknown = self._unknown, False
        self._hold(
            Step(
                start_ns=start_ns,
                end_ns=end_ns,
                index=self._index,
                micro_steps=micro_steps or max(1, len(counts)),
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=grad_norm,
            ),
            [] if is_unknown else counts,
        )

    def stepped(
        self,
        start_ns: int,
        end_ns: int,
        counts: list[Counts],
        micro_steps: int,
        after: Any = None,  # noqa: ANN401
    ) -> None:
        """A whole step, from whoever puts it together itself; no counts where they aren't known.

        `after` is what `now_on` says of counts on a device. As little as can be is done here: loops
        of tiny steps pay for nothing else.
        """
        if self.failed:
            return
        if self._logged or self._describing is None or self._to_run:
            self._before(counts)
        self._held.append(((start_ns, end_ns, self._index, micro_steps), counts, after))
        self._index += 1
        if len(self._held) > _MOST_HELD:
            self._fail(OverflowError(_TOO_MANY))

    @_guarded
    def extend(self, end_ns: int) -> None:
        """The last step is not over: another optimizer has stepped for the same batch."""
        if self._held:
            step, counts, after = self._held.pop()
            self._held.append((replace(_whole(step), end_ns=end_ns), counts, after))

    @_guarded
    def in_parts(self, why: str) -> None:
        """What was begun with is not all of the model: its FLOPs are not those of a step."""
        self._model, self._no_flops = _nothing, why

    @_guarded
    def products_in(self, dtype: str | None) -> None:
        """What products are computed in, where the Meter was not told and weights don't say."""
        meter = self.meter
        if dtype is not None and meter is not None and meter.plan.settings.dtype is None:
            meter.plan = replace(meter.plan, settings=replace(meter.plan.settings, dtype=dtype))
            if meter._handover is not None:
                meter._handover.describe(**meter.plan.facts())

    @_guarded
    def step_cancelled(self) -> None:
        """What began was no training step after all."""
        self._start_ns = None
        self._counts = []
        self._unknown = False

    @_guarded
    def logged(self, values: Mapping[str, Any]) -> None:
        """Figures that the framework logs of its last step: loss, learning rate, gradient norm.

        A number may still lie on a device: it is looked at when it is written, not here.
        """
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number or getattr(value, "shape", None) == ():
                self._logged[str(name)] = value.detach() if hasattr(value, "detach") else value

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time that is no training step: eval, checkpoint, data."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.phase_over(phase, start_ns)

    @_guarded
    def phase_over(
        self, phase: Phase, start_ns: int, *, end_ns: int | None = None, batch: object = None
    ) -> None:
        """Such a time is over, that began then."""
        end_ns = time.monotonic_ns() if end_ns is None else end_ns
        if self.meter is not None and end_ns > start_ns:
            counts = counted(batch, shifts=self._shifts) if batch is not None else None
            computed = counts.computed if counts else None
            self.meter.record(Step(start_ns, end_ns, phase=phase, tokens_computed=computed))

    @_guarded
    def mark(self, name: str, detail: str = "") -> None:
        """Name this instant in the run."""
        if self.meter is not None:
            self.meter.mark(name, detail)

    # -- inside -----------------------------------------------------------------------------------

    @_guarded
    def catch_up(self) -> None:
        """Bring what was told so far into the run, FLOPs included; it may go on afterwards."""
        self._let_go()
        self._settle(wait=True)
        if self._describing is not None:
            self._describing.join(_DESCRIBE_S)
        self._run_model()
        self._describe_again()
        if self._no_flops and self.meter is not None and self.meter._handover is not None:
            self.meter._handover.describe(flops=[], no_flops=self._no_flops)

    def _give_way(self) -> None:
        """Somebody begins to measure by their own will."""
        self.end()
        self.failed = True

    def _exit(self) -> None:
        """The program ends before its training: by an error that it did not handle, or in peace."""
        error = getattr(sys, "last_value", None)
        self.end(failure(error) if error is not None else None)

    def _hold(self, step: Step, counts: list[Counts]) -> None:
        self._index += 1
        laters = [later for one in counts for later in one.laters]
        if self._describing is None:
            self._describe(counts[0] if counts else None)
        self._let_go()
        self._run_model()
        self._last = step
        self._held.append((step, counts, now_on(laters) if laters else None))
        if len(self._held) > _MOST_HELD:
            raise OverflowError(_TOO_MANY)

    @_guarded
    def _before(self, counts: list[Counts]) -> None:
        """What is done before a step is held that is told as a whole."""
        if self._describing is None:
            self._describe(counts[0] if counts else None)
        self._let_go()
        self._run_model()

    def _let_go(self) -> None:
        """The last step is complete once the next begins: what is logged of it comes in between."""
        logged, self._logged = self._logged, {}
        last, self._last = self._last, None
        if not logged or not self._held:
            return
        newest, counts, after = self._held[-1]
        if newest is last or isinstance(newest, tuple):
            far = [value for value in logged.values() if is_later(value)]
            after = {**(after or {}), **(now_on(far) or {})}
            self._held[-1] = (_with_logged(_whole(newest), logged), counts, after)

    def _settle(self, *, wait: bool = False) -> None:
        """Pass on the steps whose tokens are known; ask for those of the others.

        On the thread that hands over; at the end on the training's, which then may wait.
        """
        if os.getpid() != self._pid:
            return
        with self._settling:
            self._settle_now(wait=wait)

    def _settle_now(self, *, wait: bool) -> None:
        while True:
            if self._fetch is not None:
                fetch, waiting = self._fetch
                if not (wait or fetch.is_here):
                    return
                self._fetch = None
                self._pass_on(waiting, fetch.values())
            # The newest may still be told a loss, which is logged after its end.
            ready = [self._held.popleft() for _ in range(len(self._held) - (not wait))]
            if not ready:
                return
            laters = [later for step, counts, _ in ready for later in _laters(step, counts)]
            if not laters:
                self._pass_on(ready, [])
                continue
            newest = {device: one for _, _, after in ready for device, one in (after or {}).items()}
            self._fetch = (Fetch(laters, newest).start(), ready)

    def _pass_on(self, rows: list[tuple[_Held, list[Counts], Any]], values: list[float]) -> None:
        assert self.meter is not None
        known = iter(values)
        for step, counts, _ in rows:
            settled = [one.settled([next(known) for _ in one.laters]) for one in counts]
            far = [name for name in _FIGURES if is_later(getattr(step, name, None))]
            if far:
                told: dict[str, Any] = {name: next(known) for name in far}
                step = replace(_whole(step), **told)
            for one in settled:
                self._seen.add(one)
            self.meter.record(_with_tokens(_whole(step), settled))

    def _describe(self, counts: Counts | None) -> None:
        """The model is known, and so is how long a sequence is: count its FLOPs, aside."""
        if counts is not None:
            rows = counts.samples if isinstance(counts.samples, int) and counts.samples else 1
            self._told_length = max(1.0, counts.computed / rows)
        self._describing = threading.Thread(
            target=self._say_who,
            args=(round(self._told_length),),
            name="ergmeter-model",
            daemon=True,
        )
        self._describing.start()

    def _say_who(self, length: int) -> None:
        """On a thread of its own: reading a configuration may take a while. What has none is run
        between two steps instead: that saves and restores what the training draws numbers from."""
        meter = self.meter
        if meter is None or meter._handover is None:
            return
        try:
            model = self._model()
            meter._handover.describe(training=training_identity(model))
            if model is not None and length and must_be_run(model, length):
                self._to_run = length
            elif model is not None:
                meter.describe(model, seq_len=length or None)
        except Exception as error:  # noqa: BLE001  never break training
            self._fail(error)

    def _run_model(self) -> None:
        """Count what has to be run for it, while the training waits: once, after its first steps.

        On another thread all the same: what looks at calls of the model knows them by theirs.
        """
        length, self._to_run = self._to_run, 0
        model, meter = self._model(), self.meter
        if not length or model is None or meter is None:
            return
        counting = threading.Thread(
            target=self._describe_now, args=(model, length), name="ergmeter-model", daemon=True
        )
        counting.start()
        counting.join()

    @_guarded
    def _describe_now(self, model: object, length: int) -> None:
        if self.meter is not None:
            self.meter.describe(model, seq_len=length, is_padded=self._is_padded)

    def _describe_again(self) -> None:
        """With the lengths that sequences had on average, as attention counts them."""
        if not self._seen.real or self.meter is None:
            return
        length, self._is_padded = self._seen.length, self._seen.computed > self._seen.real
        is_alike = abs(length - self._told_length) <= _LENGTHS_ALIKE_FRAC * self._told_length
        if not is_alike or self._is_padded:
            self._to_run = max(1, round(length))
            self._run_model()

    def _fail(self, error: Exception) -> None:
        self.failed = True
        said = f"{type(error).__name__}: {error}"[:500]
        if self.meter is not None and self.meter._handover is not None:
            t_ns = time.monotonic_ns()
            self.meter._handover.marks.append(Mark(t_ns, "integration_failed", said))
        elif not self._looks_on:  # there is no run to say it in
            say(f"nothing is measured: {error}")


@dataclass
class Seen:
    """The tokens of all steps so far, as far as attention makes a difference of their lengths."""

    computed: int = 0
    real: int = 0
    squares: int = 0

    def add(self, counts: Counts) -> None:
        """Of one batch, all numbers known."""
        self.computed += counts.computed
        self.real += counts.computed if counts.real is None else int(counts.real)
        self.squares += int(counts.squares or 0)

    @property
    def length(self) -> float:
        """How long the sequence of a token is, on the average of all tokens."""
        return self.squares / self.real


def failure(error: BaseException) -> str:
    """How a run ended that this came out of."""
    kind, what = type(error).__name__, " ".join(str(error).split())[:300]
    return f"failed ({kind}: {what})" if what else f"failed ({kind})"


def _laters(step: _Held, counts: list[Counts]) -> list[Any]:
    """What of a step is still on a device: its counts, then what was logged of it."""
    figures = [getattr(step, name, None) for name in _FIGURES]
    return [
        *(later for one in counts for later in one.laters),
        *(one for one in figures if is_later(one)),
    ]


def _whole(step: _Held) -> Step:
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
        tokens_computed=sum(one.computed for one in counts),
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


def _nothing() -> None:
    """There is no model, as far as is known."""


def _weakly(model: object) -> Callable[[], object]:
    """The model as long as the program has it."""
    try:
        return ref(model)
    except TypeError:  # a tree of arrays
        return lambda: model


def shifts_labels(model: object) -> bool:
    """Whether the model compares each label with the position before it, as causal models do."""
    names = {kind.__name__ for part in _around(model) for kind in type(part).__mro__}
    aligned = ("MaskedLM", "Seq2Seq", "ConditionalGeneration", "TokenClassification")
    return not any(name.endswith(aligned) for name in names)


def _around(model: object) -> list[object]:
    """A model and what it is wrapped around."""
    found = [model]
    for name in ("module", "_orig_mod", "base_model", "model"):
        inner = getattr(found[-1], name, None)
        if inner is not None and hasattr(inner, "parameters"):
            found.append(inner)
    return found

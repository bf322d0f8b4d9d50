"""`model.generate` of transformers, measured: TTFT, TPOT, tokens/s, IT. One line:

    measure(model, meter)  # from here on, every model.generate(...) is a record in the run

Each sequence of a batch is a request: a `prefill` span from the call to its first token, with its
prompt's tokens (without padding where there is an attention mask), and a `decode` span from its
first token to its last, with the tokens up to and including its end of sequence. What stands after
that is padding, which was computed and is counted as such.

The trap: timing what was only asked for. On a GPU, Python runs ahead of the kernels, so a clock
read in the loop times the asking; waiting for the kernels would slow what is measured. On CUDA an
event is put into the stream after each token, and all are read once, when `generate` has returned;
elsewhere the host's clock is read. Which it was is in the note. What is generated stays the same:
the only thing added to the loop is a stopping criterion that never stops.

The model itself is not touched, or its copies and pickles would generate with the original: its
class asks whether this one is measured.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass, field
from itertools import count, pairwise
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from ergmeter.errors import UsageError
from ergmeter.records import Mark, Reported, Step
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ergmeter.meter import Meter

_NS_PER_MS = 1e6
_HOST = "from the call of generate; host clock, after each token"
_CUDA = "from the call of generate; CUDA events, after each token"


def measure(model: Any, meter: Meter) -> Measured:  # noqa: ANN401  any model that generates
    """Record every `model.generate(...)` in the meter's run, from here on.

    Gives something to undo it with: `measure(...).remove()`, or `with measure(...):`.
    """
    if not callable(getattr(model, "generate", None)):
        raise UsageError(f"a {type(model).__name__} has no generate; pass a model of transformers")
    if "generate" in vars(model) or model in _measured:
        raise UsageError("this model's generate is measured, or replaced, already")
    return Measured(model, meter)


_measured: WeakKeyDictionary[Any, Measured] = WeakKeyDictionary()
_asking: set[type] = set()  # the classes whose generate asks


def _ask(kind: type) -> None:
    """Have the class that a model takes its `generate` from ask whether it is measured."""
    owner = next(one for one in kind.__mro__ if "generate" in vars(one))
    if owner in _asking:
        return
    _asking.add(owner)
    original: Any = vars(owner)["generate"]

    @functools.wraps(original)
    def generate(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        measured = _measured.get(self)
        bound = functools.partial(original, self)
        if measured is None or measured.is_inside:
            return bound(*arguments, **options)
        return measured.generated(bound, arguments, options)

    owner.generate = generate  # type: ignore[attr-defined]


class Measured:
    """A model whose `generate` is measured, until `remove`."""

    def __init__(self, model: Any, meter: Meter) -> None:  # noqa: ANN401
        self._model = ref(model)
        self._meter = meter
        self._numbers = count()
        self._told: set[str] = set()
        self.is_inside = False  # of a class that calls the generate of the one it is made from
        _ask(type(model))
        _measured[model] = self

    def remove(self) -> None:
        """Measure this model no longer."""
        model = self._model()
        if model is not None:
            _measured.pop(model, None)

    def __enter__(self) -> Measured:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def generated(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:  # noqa: ANN401  whatever generate gives
        """What the model generates, and a record of it. Our failure is a mark, and nothing else."""
        asked = times = None
        try:
            asked, times = self._prepared(arguments, options)
        except Exception as error:  # noqa: BLE001  never break what is measured
            self._fail(error)
        self.is_inside = True
        try:
            if asked is None or times is None:
                return original(*arguments, **options)
            given = original(**{**asked.options, "stopping_criteria": _and(times, asked.options)})
        finally:
            self.is_inside = False
        try:
            self._write(asked, times, getattr(given, "sequences", given))
        except Exception as error:  # noqa: BLE001  never break what is measured
            self._fail(error)
        return given

    def _prepared(
        self, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[_Asked, _Times] | tuple[None, None]:
        """What is asked for, and what will be told when each token comes; or a mark why not."""
        asked = _Asked(self._model(), _named(arguments, options))
        why_not = asked.why_not
        if why_not:
            self._tell("generate_not_measured", why_not)
            return None, None
        on_cuda = asked.device.type == "cuda"
        self._tell("latency_clock", _CUDA if on_cuda else _HOST)
        return asked, _CudaTimes(asked.device) if on_cuda else _HostTimes()

    def _fail(self, error: Exception) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self._tell("generate_not_measured", said[:300])

    def _write(self, asked: _Asked, times: _Times, sequences: torch.Tensor) -> None:
        tokens_ns = times.tokens_ns()
        if not tokens_ns:
            return
        begin = asked.begins_at(times.lengths)
        new = sequences[:, begin:]
        rows = asked.prompts(len(new))
        lengths = _lengths(new, asked.eos_ids)
        for (computed, real), length in zip(rows, lengths, strict=True):
            number = next(self._numbers)
            first_ns, last_ns = tokens_ns[0], times.reached_ns(tokens_ns, begin + length)
            self._record(
                Step(
                    times.start_ns,
                    first_ns,
                    number,
                    phase="prefill",
                    tokens_computed=computed,
                    tokens_real=real,
                    samples=1,
                )
            )
            self._record(
                Step(
                    first_ns,
                    last_ns,
                    number,
                    phase="decode",
                    tokens_computed=new.shape[1],
                    tokens_real=length,
                    samples=0,  # the sequence is counted with its prefill
                    micro_steps=sum(t_ns <= last_ns for t_ns in tokens_ns),
                )
            )
        for earlier_ns, later_ns in pairwise(tokens_ns):
            self._record(Reported(later_ns, "itl", (later_ns - earlier_ns) / NS_PER_S, "s"))

    def _record(self, record: Step | Reported) -> None:
        try:
            self._meter.record(record)
        except UsageError as error:  # a closed Meter is no reason to lose what was generated
            self._warn(f"generate is not measured: {error}")

    def _tell(self, name: str, detail: str) -> None:
        """In the run, once for each thing to tell."""
        if (name + detail) in self._told:
            return
        self._told.add(name + detail)
        try:
            self._meter.record(Mark(monotonic_ns(), name, detail))
        except UsageError as error:
            self._warn(f"generate is not measured: {error}")

    def _warn(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            warnings.warn(said, stacklevel=5)


class GeneratedTokens(Measured):
    """Counts the tokens that a model generates beside its training; their times are not taken."""

    def generated(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:  # noqa: ANN401  whatever generate gives
        """What the model generates, and how many tokens it is."""
        self.is_inside = True
        try:
            given = original(*arguments, **options)
        finally:
            self.is_inside = False
        try:
            asked = _Asked(self._model(), _named(arguments, options))
            sequences = getattr(given, "sequences", given)
            prompt = 1 if asked.model.config.is_encoder_decoder else asked.prompt_length
            tokens = sum(_lengths(sequences[:, prompt:], asked.eos_ids))
            self._record(Reported(monotonic_ns(), GENERATED, float(tokens), "tokens"))
        except Exception as error:  # noqa: BLE001  never break what is measured
            self._fail(error)
        return given


GENERATED = "generated_tokens"


@dataclass
class _Asked:
    """What a call of `generate` asks for, as far as it must be known here."""

    model: Any
    options: dict[str, Any]  # everything that was passed, by its name

    @property
    def why_not(self) -> str:
        """Why its tokens can't be told apart in time, if they can't."""
        beams = self._option("num_beams") or 1
        if beams > 1:
            return f"num_beams={beams}: beams are weighed against each other, no token is final"
        if self._inputs is None:
            return "no input_ids or inputs_embeds: how many tokens the prompt has is not known"
        return ""

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        assert self._inputs is not None
        return self._inputs.device

    @property
    def eos_ids(self) -> list[int]:
        """What ends a sequence."""
        ids = self._option("eos_token_id")
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else [int(one) for one in ids]

    def begins_at(self, lengths: list[int]) -> int:
        """Where in the output the new tokens begin: a prompt of ids stands before them."""
        if self.model.config.is_encoder_decoder:
            return lengths[0] - 1  # the decoder's own start
        return 0 if self._ids is None else self._ids.shape[1]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that stand before the new ones in the output."""
        return 0 if self._ids is None else int(self._ids.shape[1])

    def prompts(self, rows: int) -> list[tuple[int, int]]:
        """Tokens of each prompt: computed, and real. One for each sequence that came out."""
        assert self._inputs is not None
        batch, computed = self._inputs.shape[:2]
        mask = self.options.get("attention_mask")
        real = (
            mask.sum(-1).tolist()
            if isinstance(mask, torch.Tensor) and mask.dim() == 2
            else [computed] * batch
        )
        several = rows // batch  # num_return_sequences: each prompt is computed so often
        return [(computed, int(one)) for one in real for _ in range(several)]

    @property
    def _ids(self) -> torch.Tensor | None:
        first = self.options.get("inputs")
        ids = first if first is not None else self.options.get("input_ids")
        return ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None

    @property
    def _inputs(self) -> torch.Tensor | None:
        embedded = self.options.get("inputs_embeds")
        return embedded if embedded is not None else self._ids

    def _option(self, name: str) -> Any:  # noqa: ANN401
        if self.options.get(name) is not None:
            return self.options[name]
        given = getattr(self.options.get("generation_config"), name, None)
        if given is not None:
            return given
        return getattr(self.model.generation_config, name, None)


@dataclass
class _Times:
    """A stopping criterion that never stops: it is called after each token."""

    lengths: list[int] = field(default_factory=list)  # of the sequences, at each call
    start_ns: int = field(default_factory=monotonic_ns)

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> bool:
        self._note()
        self.lengths.append(input_ids.shape[1])
        return False

    def tokens_ns(self) -> list[int]:
        """When each call's token was there."""
        raise NotImplementedError

    def reached_ns(self, tokens_ns: list[int], length: int) -> int:
        """When sequences were so long: a call may add several tokens (assisted decoding)."""
        at = zip(tokens_ns, self.lengths, strict=True)
        return next((t_ns for t_ns, reached in at if reached >= length), tokens_ns[-1])

    def _note(self) -> None:
        raise NotImplementedError


@dataclass
class _HostTimes(_Times):
    """By the host's clock."""

    _seen_ns: list[int] = field(default_factory=list)

    def _note(self) -> None:
        self._seen_ns.append(monotonic_ns())

    def tokens_ns(self) -> list[int]:
        return self._seen_ns


class _CudaTimes(_Times):
    """By events in the stream, which cost the host a few microseconds and the device nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._events = [self._event()]
        self.start_ns = monotonic_ns()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _note(self) -> None:
        self._events.append(self._event())

    def tokens_ns(self) -> list[int]:
        begun, *tokens = self._events
        if tokens:
            tokens[-1].synchronize()  # generate has read the token already: nothing to wait for
        return [self.start_ns + round(begun.elapsed_time(one) * _NS_PER_MS) for one in tokens]


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What was passed by its place, by its name; wrappers pass on whatever they are given."""
    from transformers import GenerationMixin  # noqa: PLC0415  loaded by whoever has a model

    signature = inspect.signature(GenerationMixin.generate)
    names = [name for name in signature.parameters if name != "self"]
    return {**dict(zip(names, arguments, strict=False)), **options}


def _and(times: _Times, options: dict[str, Any]) -> Any:  # noqa: ANN401
    from transformers import StoppingCriteriaList  # noqa: PLC0415

    return StoppingCriteriaList([*(options.get("stopping_criteria") or ()), times])


def _lengths(new: torch.Tensor, eos_ids: list[int]) -> list[int]:
    """Tokens of each sequence up to and including its first end of sequence."""
    if not eos_ids:
        return [new.shape[1]] * len(new)
    is_end = torch.isin(new, torch.tensor(eos_ids, device=new.device))
    # A place behind the last stands for "never ended".
    places = torch.where(is_end.any(-1), is_end.int().argmax(-1) + 1, new.shape[1])
    return [int(place) for place in places.tolist()]

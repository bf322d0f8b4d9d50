"""Measures `model.generate` of transformers: TTFT, TPOT, tokens/s, inter-token latency.

    measure(model, meter)  # from here on, every model.generate(...) is a record in the run

Each sequence of a batch is a request. Its `prefill` span lasts from the call to its first token and
has its prompt's tokens, without padding where there is an attention mask. Its `decode` span lasts
from its first token to its last, and counts tokens up to and including the end of sequence.
Positions after that are padding: computed, not real.

On a GPU, Python runs ahead of the kernels: a clock read in the loop would time the launches, and
waiting for the kernels would slow generation. On CUDA an event is recorded after each token, and
all are read when `generate` has returned; elsewhere the host's clock is read. The run's mark names
the clock. The only addition to the loop is a stopping criterion that never stops, so the output is
unchanged.

The model object is not modified, so that its copies and pickles work: its class looks up whether
the instance is measured.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from contextlib import contextmanager
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
    from collections.abc import Callable, Iterator

    from ergmeter.meter import Meter

_NS_PER_MS = 1e6
_HOST = "from the call of generate; host clock, after each token"
_CUDA = "from the call of generate; CUDA events, after each token"


def measure(model: Any, meter: Meter) -> Measured:  # noqa: ANN401  any model that generates
    """Record every `model.generate(...)` in the meter's run, from here on.

    To stop, call `measure(...).remove()`, or use `with measure(...):`.
    """
    if not callable(getattr(model, "generate", None)):
        raise UsageError(f"a {type(model).__name__} has no generate; pass a model of transformers")
    if "generate" in vars(model) or model in _measured:
        raise UsageError("this model's generate is already measured, or was replaced")
    return Measured(model, meter)


_measured: WeakKeyDictionary[Any, Measured] = WeakKeyDictionary()
_wrapped_classes: set[type] = set()  # whose generate is wrapped


def _wrap_generate(kind: type) -> None:
    """Wrap the class that defines a model's `generate`, to measure registered models."""
    owner = next(base for base in kind.__mro__ if "generate" in vars(base))
    if owner in _wrapped_classes:
        return
    _wrapped_classes.add(owner)
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
        self._reported: set[str] = set()
        self.is_inside = False  # within a call: a subclass's generate may call its base class's
        _wrap_generate(type(model))
        _measured[model] = self

    def remove(self) -> None:
        """Stop measuring this model."""
        model = self._model()
        if model is not None:
            _measured.pop(model, None)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()

    def generated(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:  # noqa: ANN401  whatever generate gives
        """Call `original` and record the generation. An exception of ergmeter becomes a mark."""
        asked = times = None
        with self._until_it_fails():
            asked, times = self._prepared(arguments, options)
        if asked is not None and times is not None:
            from transformers import StoppingCriteriaList  # noqa: PLC0415  loaded if there is a model

            criteria = [*(asked.options.get("stopping_criteria") or ()), times]
            options = {**asked.options, "stopping_criteria": StoppingCriteriaList(criteria)}
            arguments = ()
        self.is_inside = True
        try:
            output = original(*arguments, **options)
        finally:
            self.is_inside = False
        if asked is not None:
            with self._until_it_fails():
                self._write(asked, times, getattr(output, "sequences", output))
        return output

    def _prepared(
        self, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[_Asked | None, _Times | None]:
        """The call's arguments and the clock of its tokens; two Nones if it can't be measured."""
        asked = _Asked(self._model(), _by_name(arguments, options))
        why_not = asked.why_not
        if why_not:
            self._tell("generate_not_measured", why_not)
            return None, None
        on_cuda = asked.device.type == "cuda"
        self._tell("latency_clock", _CUDA if on_cuda else _HOST)
        return asked, _CudaTimes(asked.device) if on_cuda else _Times()

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """A context in which an exception becomes a mark."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the user generates: never break that
            message = " ".join(f"{type(error).__name__}: {error}".split())
            self._tell("generate_not_measured", message[:300])

    def _write(self, asked: _Asked, times: _Times | None, sequences: torch.Tensor) -> None:
        assert times is not None
        tokens_ns = times.tokens_ns()
        if not tokens_ns:
            return
        # New tokens begin after a prompt of ids, or after the decoder's own start.
        is_seq2seq = asked.model.config.is_encoder_decoder
        begin = times.lengths[0] - 1 if is_seq2seq else asked.prompt_length
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

    def _record(self, record: Step | Reported | Mark) -> None:
        try:
            self._meter.record(record)
        except UsageError as error:  # a closed Meter must not lose the generated tokens
            message = f"generate is not measured: {error}"
            if message not in self._reported:
                self._reported.add(message)
                warnings.warn(message, stacklevel=5)

    def _tell(self, name: str, detail: str) -> None:
        """Add a mark to the run, once for each text."""
        if (name + detail) not in self._reported:
            self._reported.add(name + detail)
            self._record(Mark(monotonic_ns(), name, detail))


class GeneratedTokens(Measured):
    """Counts the tokens that a model generates during its training, without timing them."""

    def _prepared(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[_Asked, None]:
        return _Asked(self._model(), _by_name(arguments, options)), None

    def _write(self, asked: _Asked, _times: _Times | None, sequences: torch.Tensor) -> None:
        prompt = 1 if asked.model.config.is_encoder_decoder else asked.prompt_length
        tokens = sum(_lengths(sequences[:, prompt:], asked.eos_ids))
        self._record(Reported(monotonic_ns(), GENERATED, float(tokens), "tokens"))


GENERATED = "generated_tokens"


@dataclass
class _Asked:
    """The arguments of one call of `generate`."""

    model: Any
    options: dict[str, Any]  # everything that was passed, by its name

    @property
    def why_not(self) -> str:
        """Why the times of single tokens can't be measured; empty if they can."""
        beams = self._option("num_beams") or 1
        if beams > 1:
            return f"num_beams={beams}: in beam search no token is final before the end"
        if self._inputs is None:
            return "no input_ids or inputs_embeds: the number of prompt tokens is unknown"
        return ""

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        assert self._inputs is not None
        return self._inputs.device

    @property
    def eos_ids(self) -> list[int]:
        """The token ids that end a sequence."""
        ids = self._option("eos_token_id")
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else [int(token_id) for token_id in ids]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that precede the new ones in the output."""
        return 0 if self._ids is None else int(self._ids.shape[1])

    def prompts(self, rows: int) -> list[tuple[int, int]]:
        """Computed and real prompt tokens of each output sequence."""
        assert self._inputs is not None
        batch, computed = self._inputs.shape[:2]
        mask = self.options.get("attention_mask")
        real = (
            mask.sum(-1).tolist()
            if isinstance(mask, torch.Tensor) and mask.dim() == 2
            else [computed] * batch
        )
        several = rows // batch  # num_return_sequences: each prompt is computed so often
        return [(computed, int(tokens)) for tokens in real for _ in range(several)]

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
        value = getattr(self.options.get("generation_config"), name, None)
        if value is not None:
            return value
        return getattr(self.model.generation_config, name, None)


@dataclass
class _Times:
    """A stopping criterion that never stops: it stores the host's time after each token."""

    lengths: list[int] = field(default_factory=list)  # of the sequences, at each call
    start_ns: int = field(default_factory=monotonic_ns)
    _stamps: list[Any] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> bool:
        self._stamps.append(self._stamp())
        self.lengths.append(input_ids.shape[1])
        return False

    def tokens_ns(self) -> list[int]:
        """The time at each call of this criterion, when its token was there."""
        return self._stamps

    def reached_ns(self, tokens_ns: list[int], length: int) -> int:
        """When sequences reached this length: a call may add several tokens (assisted decoding)."""
        at = zip(tokens_ns, self.lengths, strict=True)
        return next((t_ns for t_ns, reached in at if reached >= length), tokens_ns[-1])

    def _stamp(self) -> Any:  # noqa: ANN401
        return monotonic_ns()


class _CudaTimes(_Times):
    """Token times by CUDA events, which cost the host microseconds and the device nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._begun = self._stamp()
        self.start_ns = monotonic_ns()

    def _stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def tokens_ns(self) -> list[int]:
        if self._stamps:
            self._stamps[-1].synchronize()  # generate has read the token: nothing to wait for
        elapsed_ms = (self._begun.elapsed_time(event) for event in self._stamps)
        return [self.start_ns + round(ms * _NS_PER_MS) for ms in elapsed_ms]


def _by_name(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by their names, with the keyword arguments."""
    from transformers import GenerationMixin  # noqa: PLC0415  loaded if there is a model

    signature = inspect.signature(GenerationMixin.generate)
    names = [name for name in signature.parameters if name != "self"]
    return {**dict(zip(names, arguments, strict=False)), **options}


def _lengths(new: torch.Tensor, eos_ids: list[int]) -> list[int]:
    """Tokens of each sequence up to and including its first end of sequence."""
    if not eos_ids:
        return [new.shape[1]] * len(new)
    is_end = torch.isin(new, torch.tensor(eos_ids, device=new.device))
    # The length itself means "never ended".
    places = torch.where(is_end.any(-1), is_end.int().argmax(-1) + 1, new.shape[1])
    return [int(length) for length in places.tolist()]

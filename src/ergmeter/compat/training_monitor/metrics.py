"""What one logged step comes to: MFU, tokens and samples a second, under a TrainingMonitor's names.

The traps are the original's: the FLOPs of one micro-batch over the time of all of them, a forward
pass taken for a step, one rank's batch beside all ranks' time. Here everything is of one optimizer
step: FLOPs and their rate of this rank's device, tokens and samples of all ranks.

The mask that a step is logged with is that of this rank's last micro-batch. The step is taken to
have as many such as there is accumulation, and the ranks to have as many tokens as this one; both
are exact where there is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError
from ergmeter.integrations.batches import Counts
from ergmeter.integrations.device_fetch import Fetch, now_on
from ergmeter.records import Missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.live.totals import Amount

NO_MASK = "no attention_mask was given to log_step, so the tokens of the step are not known"


@dataclass(frozen=True, slots=True)
class Masked:
    """What a mask says. The sums may still be on their way from a device."""

    rows: int
    computed: int
    real: Any
    squares: Any  # sum over rows of their length squared: what attention pays for
    fetch: Fetch | None

    @classmethod
    def of(cls, mask: Any, *, fetched: bool) -> Masked | None:  # noqa: ANN401  a tensor or an array
        """None where it is no mask of rows of tokens. `fetched`: somebody will ask for the sums."""
        shape = tuple(getattr(mask, "shape", ()))
        if not 1 <= len(shape) <= 2 or 0 in shape:
            return None
        rows, length = (1, int(shape[0])) if len(shape) == 1 else (int(shape[0]), int(shape[1]))
        lengths = (mask != 0).sum(-1)
        real, squares = lengths.sum(), (lengths * lengths).sum()
        if getattr(getattr(mask, "device", None), "type", "cpu") == "cpu":
            return cls(rows, rows * length, int(real), int(squares), None)
        fetch = Fetch([real, squares], now_on([real])).start() if fetched else None
        return cls(rows, rows * length, real, squares, fetch)

    def counts(self, micro_steps: int) -> Counts:
        """As a Training takes them."""
        each = (self.computed, self.rows, self.real, self.squares)
        computed, rows, real, squares = (micro_steps * one for one in each)
        return Counts(computed, samples=rows, real=real, loss=None, squares=squares)

    @property
    def is_here(self) -> bool:
        """Whether the sums can be looked at without waiting."""
        return self.fetch is None or self.fetch.is_here

    def sums(self) -> tuple[int, int]:
        """Real tokens, and the sum of squared lengths."""
        if self.fetch is None:
            return self.real, self.squares
        real, squares = self.fetch.values()
        return int(real), int(squares)


@dataclass(frozen=True, slots=True)
class StepConstants:
    """What is the same for every step."""

    micro_steps: int
    world: int
    batch_size: int | None
    token_flops: Callable[[float], float]  # of a token in sequences of this length
    peak_flops_per_s: Callable[[], Amount]


def step_figures(
    step_s: float | None, masked: Masked | None, place: StepConstants
) -> dict[str, Amount]:
    """The perf/ figures of a step by name; what is not known says why."""
    if step_s is None or step_s <= 0:
        absent = Missing("how long this step took is not known")
        return dict.fromkeys(("step_time", "mfu", "tokens_per_second"), absent)
    found: dict[str, Amount] = {"step_time": step_s, "steps_per_second": 1 / step_s}
    rows = masked.rows * place.micro_steps * place.world if masked else place.batch_size
    if rows:
        found["samples_per_second"] = rows / step_s
    if masked is None:
        return {**found, **dict.fromkeys(("mfu", "tokens_per_second"), Missing(NO_MASK))}
    real, squares = masked.sums()
    if not real:
        empty = Missing("the attention_mask masks every token")
        return {**found, **dict.fromkeys(("mfu", "tokens_per_second"), empty)}
    tokens = real * place.micro_steps
    found["tokens_per_second"] = tokens * place.world / step_s
    found["actual_seq_length"] = real / masked.rows
    # Attention grows with the square of a length: this is the one length that all rows could have.
    length = squares / real
    try:
        flops = tokens * place.token_flops(length)
    except ErgmeterError as error:
        return {**found, "mfu": Missing(str(error))}
    found |= {"actual_flops": flops, "flops_per_second": flops / step_s}
    peak = place.peak_flops_per_s()
    found["mfu"] = peak if isinstance(peak, Missing) else flops / step_s / peak
    if not isinstance(found["mfu"], Missing):
        found["mfu_percent"] = 100 * found["mfu"]
    return found

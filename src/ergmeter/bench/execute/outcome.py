"""How a cell ended (ok, failed, out of memory, timed out) and why; which expectations it met.

torch, CUDA, cuBLAS and the host's allocator each word an out-of-memory error differently, a rank's
line begins with "[rank1]: ", and the kernel kills without a message. The words decide nothing if
the command succeeded, or went on and failed later for another reason.

A scenario may expect a pattern in the output or a fact in the run's header, because plugins fall
back silently. A fact that the run does not report is not met.
"""

from __future__ import annotations

import math
import re
import signal as signals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ergmeter.compare.entry import fact

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.bench.plan.cells import Expectation

_LONGEST_LINE = 200
# The facts in the header of a run of `erg train`.
ERG_TRAIN_FACTS = (
    *("attention", "backend", "batch_size", "bits", "bitsandbytes", "checkpoints", "compute_dtype"),
    *("config", "data_sha256", "dataset", "evaluation", "git_commit", "grad_accum"),
    *("gradient_checkpointing", "kernels", "lora_alpha", "lora_dropout", "lora_r", "lora_targets"),
    *("lr", "lr_scheduler", "model", "optimizer", "packing", "pad_to_multiple_of", "parameters"),
    *("peft", "precision", "seed", "seq_len", "started", "status", "steps", "threads", "torch"),
    *("train_loss", "trainable_parameters", "trainer", "transformers", "trl", "tuning", "unsloth"),
    *("weights_dtype", "world_size", "eval_loss", "mean_train_loss", "currency"),
)


def check_expectations(
    claims: Sequence[Expectation], *, outputs: Iterable[Path] = (), workload: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the entry in status.json of each expectation: `held` (is it met), `seen` (evidence).

    `outputs` are the cell's stdout and stderr.
    """
    patterns = {c: re.compile(str(c.value)) for c in claims if c.kind == "pattern"}
    lines = _first_lines(patterns, outputs)
    for claim in claims:
        if claim in patterns:
            is_met = claim in lines
            evidence = lines.get(claim, f"no line of the output has {claim.value!r}")
        else:
            value = workload.get(claim.name)
            is_met = value is not None and _same(value, claim.value)
            evidence = "the run does not record it" if value is None else str(value)
        yield {"name": claim.name, "held": is_met, "seen": evidence}


def _first_lines(
    patterns: Mapping[Expectation, re.Pattern[str]], outputs: Iterable[Path]
) -> dict[Expectation, str]:
    """The first output line that each pattern matches; read line by line, as logs may be long."""
    first_lines: dict[Expectation, str] = {}
    if not patterns:
        return first_lines
    for line in _lines(outputs):
        for claim, pattern in patterns.items():
            if claim not in first_lines and pattern.search(line):
                first_lines[claim] = line.strip()[:_LONGEST_LINE]
        if len(first_lines) == len(patterns):
            break
    return first_lines


def _lines(outputs: Iterable[Path]) -> Iterator[str]:
    for path in outputs:
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file


def _same(value: object, wanted: object) -> bool:
    """True for equal values: 1024, "1024" and 1024.0 are equal, and so are True and "true"."""
    left, right = fact(value), fact(wanted)
    if left == right:
        return True
    try:
        return float(str(left)) == float(str(right))
    except ValueError:
        return False


Status: TypeAlias = Literal[
    "pending", "running", "ok", "oom", "error", "timeout", "diverged", "cancelled", "skipped"
]
# What is not run again when a bench is resumed.
FINAL: frozenset[Status] = frozenset({"ok", "oom", "error", "timeout", "diverged", "skipped"})

KILLED = 128 + signals.SIGKILL  # what a shell, a container and `erg record` make of a SIGKILL
_MEMORY = re.compile(
    r"\bOutOfMemoryError\b"
    r"|(?:CUDA|HIP|XPU|MPS|NCCL)\b[^\n]{0,60}\bout of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|RESOURCE_EXHAUSTED: [^\n]*[Oo]ut of memory"
    r"|\bMemoryError\b|std::bad_alloc|Cannot allocate memory"
    r"|Detected \d+ oom[-_]kill event|oom-kill event"
)
# How torchrun and accelerate tell that a rank was killed; their own exit code is then 1.
_RANK_KILLED = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\) received by PID")
_PREFIX = re.compile(r"^\[(?:rank|default)(\d+)\]:? ?|^(\d+): (?=Traceback|\s|[\w.]+(?::|$))")
_OPENS = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"During handling of the above exception|The above exception was the direct cause"
)
_CLOSES = re.compile(r"[A-Za-z_][\w.]*(?::| \(|$)")
# What other ranks and launchers say once a rank is gone: never the cause.
_CONSEQUENCES = re.compile(
    r"ChildFailedError|CalledProcessError|DistBackendError|DistNetworkError|SignalException"
    r"|Connection (?:closed|reset) by peer|ProcessRaisedException"
    r"|DistStoreError|Broken ?[Pp]ipe|Connection refused|ConnectionResetError|connectFullMesh"
)
_LAUNCHERS = re.compile(r"ChildFailedError|CalledProcessError|SignalException")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """The status of a cell that has ended, and the reason in one line; empty if it is ok."""

    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """The last line of a traceback, and the rank that printed it (None if not named)."""

    line: str
    rank: int | None = None
    line_number: int = field(default=0, compare=False)
    is_chained: bool = False  # raised while the one before it was handled, or because of it

    def __str__(self) -> str:
        return self.line if self.rank is None else f"rank {self.rank}: {self.line}"


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The last output of the processes of one node, and their exit code."""

    stdout: str
    stderr: str
    exit_code: int | None = None
    recorded_signal: int | None = None  # the signal that ended it, by its run

    @property
    def signal(self) -> int | None:
        """The signal that ended the processes, if one did."""
        if self.exit_code is not None and self.exit_code < 0:
            return -self.exit_code
        return self.recorded_signal

    @property
    def raised(self) -> list[Raised]:
        """The last lines of all tracebacks."""
        return [*tracebacks(self.stdout.splitlines()), *tracebacks(self.stderr.splitlines())]

    @property
    def causes(self) -> list[Raised]:
        """Tracebacks that are not just the consequence of another process's end."""
        return [error for error in self.raised if not _CONSEQUENCES.search(error.line)]


def telling(nodes: Sequence[ParsedOutput]) -> ParsedOutput:
    """Return the output that explains a failure. `nodes` are in the order in which they failed.

    It is that of the first node whose output has a cause; without any, all outputs joined.
    """
    for node in nodes if len(nodes) > 1 else ():
        if _out_of_memory(node) or node.causes:
            return node
    texts = [(node.stdout, node.stderr) for node in nodes]
    stdout, stderr = ("\n".join(streams) for streams in zip(*texts, strict=True))
    return ParsedOutput(stdout, stderr, nodes[0].exit_code)


def outcome(
    output: ParsedOutput,
    *,
    loss: float | None = None,
    timed_out_s: float | None = None,
    cancelled: str = "",
    broken: str = "",
    kernel_kills: int | None = None,
) -> CellOutcome:
    """Judge how a command ended, by its exit code and the end of its output.

    `loss`: the last one known. `kernel_kills`: how many processes the kernel has killed for memory
    meanwhile; None if its count can't be read. `broken`: the error that made us stop watching.
    """
    if cancelled:
        return CellOutcome("cancelled", cancelled)
    if timed_out_s is not None:
        return CellOutcome("timeout", f"it was ended after {timed_out_s:g} s, its limit")
    is_well = output.exit_code == 0 and output.signal is None
    if is_well and (loss is None or math.isfinite(loss)):
        return CellOutcome("ok")
    if not is_well:
        lacking = _out_of_memory(output, kernel_kills)
        if lacking:
            return CellOutcome("oom", lacking)
    if loss is not None and not math.isfinite(loss):
        return CellOutcome("diverged", f"the loss became {loss}")
    if broken and not output.causes:
        return CellOutcome("error", _short(f"it was cut short: {broken}"))
    killed = _killed(output)
    if killed and not output.causes:
        return CellOutcome("error", f"{killed}; the kernel's count of OOM kills did not rise")
    return CellOutcome("error", _error(output))


def _out_of_memory(output: ParsedOutput, kills: int | None = None) -> str:
    """How the cell ran out of memory; empty if it did not."""
    memory_line = _memory_line(output)
    if memory_line:
        return memory_line
    if output.exit_code == KILLED and output.signal is None:
        # The SIGKILL may have been on another machine, which our kernel's count does not cover.
        return f"exit code 137, as of a killed process (SIGKILL), {_by_whom(kills)}"
    what = _killed(output)
    return f"{what}, {_by_whom(kills)}" if what and kills != 0 else ""


def _killed(output: ParsedOutput) -> str:
    """The text that says what SIGKILL ended; empty if it ended nothing."""
    if output.signal == signals.SIGKILL:
        return "it was killed (SIGKILL)"
    if _RANK_KILLED.search(output.stderr) or _RANK_KILLED.search(output.stdout):
        return "one of its ranks was killed (SIGKILL)"
    return ""


def _by_whom(kills: int | None) -> str:
    if kills is None:
        return "as the kernel's OOM killer does; its count of kills can't be read here"
    if kills > 0:
        return f"by the kernel's OOM killer: its count of kills rose by {kills}"
    return "as the kernel's OOM killer does; its count did not rise here"


def _memory_line(output: ParsedOutput) -> str:
    """The first out-of-memory line that the program did not recover from, stderr first."""
    above = output.stdout.splitlines()
    lines = [*above, *output.stderr.splitlines()]
    memory_lines = []
    for number, line in enumerate(lines):
        rank, bare = _unprefixed(line)
        # An indented line of a traceback is source text: it may just name the exception.
        if not bare.startswith("    ") and _MEMORY.search(bare):
            memory_lines.append(Raised(bare.strip(), rank, number))
    others = list(_of_other_causes(tracebacks(lines))) if memory_lines else []
    left = [error for error in memory_lines if not _is_got_over(error, others)]
    left.sort(key=lambda error: error.line_number < len(above))
    return _short(str(left[0])) if left else ""


def _is_got_over(memory_line: Raised, others: Iterable[Raised]) -> bool:
    """True if the program went on after that line and failed later for another reason.

    Later errors of other ranks do not count: one rank's lack of memory causes them.
    """
    return any(
        other.line_number > memory_line.line_number
        and (memory_line.rank is None or other.rank == memory_line.rank)
        for other in others
    )


def _of_other_causes(raised: Iterable[Raised]) -> Iterator[Raised]:
    """Yield tracebacks that neither involve lack of memory nor follow from another's end."""
    is_of_memory: dict[int | None, bool] = {}
    for error in raised:
        before = error.is_chained and is_of_memory.get(error.rank, False)
        is_of_memory[error.rank] = before or bool(_MEMORY.search(error.line))
        if not is_of_memory[error.rank] and not _CONSEQUENCES.search(error.line):
            yield error


def _error(output: ParsedOutput) -> str:
    raised = output.raised
    # A lost connection is the cause if nothing else is reported; a launcher's error never is.
    ranks = [error for error in raised if not _LAUNCHERS.search(error.line)]
    if raised:
        return _short(str((output.causes or ranks or raised)[-1]))
    how = _how_it_ended(output)
    text = output.stderr or output.stdout
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(f"{how}: {lines[-1]}" if lines else f"{how}, without any output")


def _how_it_ended(output: ParsedOutput) -> str:
    if output.signal is None:
        return f"exit code {output.exit_code}"
    try:
        return f"ended by {signals.Signals(output.signal).name}"
    except ValueError:
        return f"ended by signal {output.signal}"


def tracebacks(lines: Iterable[str]) -> Iterator[Raised]:
    """The last line of every traceback, in the order in which they end; ranks may be mixed."""
    is_open: set[int | None] = set()
    chained: set[int | None] = set()
    for number, line in enumerate(lines):
        rank, text = _unprefixed(line.rstrip())
        if text.lstrip(" +|").startswith(_OPENS):
            is_open.add(rank)
        elif rank in is_open and _CLOSES.match(text):  # what is indented is still inside
            yield Raised(text, rank, number, is_chained=rank in chained)
            is_open.discard(rank)
            chained.discard(rank)
        elif _CHAINED.match(text):
            chained.add(rank)


def _unprefixed(line: str) -> tuple[int | None, str]:
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    return int(match[1] or match[2]), line[match.end() :]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

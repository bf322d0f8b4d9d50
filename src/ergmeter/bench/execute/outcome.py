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
# What the header of a run of `erg train` tells.
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
    """The entry in status.json of each expectation: `held`, and in `seen` what shows it.

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
            evidence = "the run does not tell it" if value is None else str(value)
        yield {"name": claim.name, "held": is_met, "seen": evidence}


def _first_lines(
    patterns: Mapping[Expectation, re.Pattern[str]], outputs: Iterable[Path]
) -> dict[Expectation, str]:
    """The first line that each pattern is in: line by line, since a log may be of any length."""
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
    """1024, "1024" and 1024.0 are one number, True and "true" one answer."""
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
    """The status of a cell that has ended, and why, in one line; empty where all went well."""

    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """The last line of a traceback, and whose it is (None where no rank is named)."""

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
    recorded_signal: int | None = None  # what ended it as its run has it, whatever the exit code

    @property
    def signal(self) -> int | None:
        """What ended it, if a signal did."""
        if self.exit_code is not None and self.exit_code < 0:
            return -self.exit_code
        return self.recorded_signal

    @property
    def raised(self) -> list[Raised]:
        """The last lines of all tracebacks."""
        return [*tracebacks(self.stdout.splitlines()), *tracebacks(self.stderr.splitlines())]

    @property
    def causes(self) -> list[Raised]:
        """Tracebacks that are no consequence of another's end."""
        return [error for error in self.raised if not _CONSEQUENCES.search(error.line)]


def telling(nodes: Sequence[ParsedOutput]) -> ParsedOutput:
    """The first node, in the order of failure, whose output has a cause.

    All of them together where none does. Put in a row by number they would read as if what the
    last node says came last.
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
    """What the end of a command was, by the last parts of its output.

    `loss` is the last one that is known; `kernel_kills` by how much the kernel's own count of
    processes it killed for memory rose meanwhile, where it can be read; `broken` what kept us from
    seeing it to its end.
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
    """How it ran out of memory; empty if it did not."""
    memory_line = _memory_line(output)
    if memory_line:
        return memory_line
    if output.exit_code == KILLED and output.signal is None:
        # Somebody else saw the SIGKILL, perhaps on another machine: our kernel's count is not its.
        return f"exit code 137, as of what was killed (SIGKILL), {_by_whom(kills)}"
    what = _killed(output)
    return f"{what}, {_by_whom(kills)}" if what and kills != 0 else ""


def _killed(output: ParsedOutput) -> str:
    """What was ended by a SIGKILL; empty if nothing was."""
    if output.signal == signals.SIGKILL:
        return "it was killed (SIGKILL)"
    if _RANK_KILLED.search(output.stderr) or _RANK_KILLED.search(output.stdout):
        return "one of its ranks was killed (SIGKILL)"
    return ""


def _by_whom(kills: int | None) -> str:
    if kills is None:
        return "as the kernel's OOM killer does; its count of kills can't be read here"
    if kills > 0:
        return f"by the kernel's OOM killer: it counted {kills} meanwhile"
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

    One rank's lack of memory is the cause of what other ranks say after it.
    """
    return any(
        other.line_number > memory_line.line_number
        and (memory_line.rank is None or other.rank == memory_line.rank)
        for other in others
    )


def _of_other_causes(raised: Iterable[Raised]) -> Iterator[Raised]:
    """Tracebacks that lack of memory has no part in, and that are no consequences."""
    is_of_memory: dict[int | None, bool] = {}
    for error in raised:
        before = error.is_chained and is_of_memory.get(error.rank, False)
        is_of_memory[error.rank] = before or bool(_MEMORY.search(error.line))
        if not is_of_memory[error.rank] and not _CONSEQUENCES.search(error.line):
            yield error


def _error(output: ParsedOutput) -> str:
    raised = output.raised
    # Where a connection is all that is told of, it is the cause; what a launcher says never is.
    ranks = [error for error in raised if not _LAUNCHERS.search(error.line)]
    if raised:
        return _short(str((output.causes or ranks or raised)[-1]))
    how = _how_it_ended(output)
    text = output.stderr or output.stdout
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(f"{how}: {lines[-1]}" if lines else f"{how}, and it said nothing")


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

"""Lines as known training programs print them, with figures chosen by the test."""

from __future__ import annotations

from ergmeter.ports import Importer, Line
from ergmeter.records import Record

S = 1_000_000_000

# The line of NXDT's own tutorial (hf_llama3_8B_DPO_ORPO), with its figures left open.
NXDT_BAR = (
    "Epoch {epoch}:   5%|▍         | {n}/62 [{elapsed}<58:44,  0.02it/s, v_num=8-06, "
    "reduced_train_loss={loss}, chosen_rewards=-0.81, rejected_rewards=-0.675, lr=2.73e-5, "
    "parameter_norm=1.95e+3, global_step={step}, consumed_samples={samples}, throughput={rate}, "
    "throughput_peak=0.0677, gradient_norm=8.600]"
)
MEGATRON = (
    " [2024-04-06 {clock}] iteration {n:8d}/    1000 | consumed samples: {samples:12d} | elapsed "
    "time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 239.8 | learning rate: "
    "8.600000E-06 | global batch size:   128 | lm loss: {loss} | load_balancing_loss: 1.019746E+00 "
    "| loss scale: 1.0 | grad norm: 1.426 | num zeros: 0.0 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
TITAN = (
    "[rank{rank}]:[titan] 2025-06-16 {clock} - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss: "
    "{loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2500  \x1b[38;2;54;234;195mmemory: "
    "49.66GiB(52.28%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m"
)
TITAN_STARTS = (
    "[rank0]:[titan] 2025-06-16 22:00:00,000 - root - INFO - Training starts at step 1, with local "
    "batch size 8, global batch size 64, sequence length 8192, total steps 1000 (warmup 200)"
)
# As the document of EfficientLLM's metrics shows it.
EFFICIENTLLM = (
    "[EfficientLLM Metrics] Iteration {n}:",
    "  Loss: 3.245678",
    "  AMU (GB): 45.23",
    "  PCU (Ratio): 0.987",
    "  AL (Seconds): 0.1234",
    "  TT (Tokens/Param/Sec): 1.23e-06",
    "  ST (Samples/Param/Sec): 4.56e-09",
    "  AEC (Watts): 342.5",
)


def clock(second: float) -> str:
    whole = int(second)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def elapsed(second: int) -> str:
    """As tqdm shows it: hours only where there are any."""
    hours = f"{second // 3600}:" if second >= 3600 else ""
    return f"{hours}{second // 60 % 60:02d}:{second % 60:02d}"


def nxdt(step: int, second: int, *, epoch: int = 0, batch: int = 32, loss: str = "6.930") -> str:
    return NXDT_BAR.format(
        epoch=epoch, n=step, elapsed=elapsed(second), loss=loss, rate="0.108",
        step=lightning(float(step)), samples=lightning(float(step * batch)),
    )  # fmt: skip


def lightning(value: float) -> str:
    """A figure of a bar as tqdm and Lightning print it: the shorter of three digits and all."""
    short = f"{value:.3g}".replace("e+0", "e+").replace("e-0", "e-")
    text = short if len(short) < len(str(value)) else str(value)
    if "e" in text:
        return text
    text = text if "." in text else f"{text}."
    return text.ljust(5, "0")


def megatron(n: int, second: float, *, ms: float = 5444.9, loss: str = "1.825991E+00") -> str:
    return MEGATRON.format(clock=clock(second), n=n, samples=n * 128, ms=ms, loss=loss)


def titan(n: int, second: float, *, rank: int = 0, loss: float = 6.1384) -> str:
    stamp = f"{clock(second)},{round(second % 1 * 1000):03d}"
    return TITAN.format(rank=rank, clock=stamp, n=n, loss=loss, tps="5,856")


def efficientllm(n: int) -> list[str]:
    return [line.format(n=n) for line in EFFICIENTLLM]


def from_file(importer: Importer, *texts: str) -> list[Record]:
    return list(importer.records([Line(text) for text in texts]))


def live(importer: Importer, *timed: tuple[float, str]) -> list[Record]:
    return list(importer.records([Line(text, round(t_s * S)) for t_s, text in timed]))

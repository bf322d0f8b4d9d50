"""`model.generate` on a real GPU: CUDA events against a loop that waits for the device."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Meter, Reading

pytestmark = pytest.mark.device


def test_ttft_and_tpot_agree_with_a_loop_that_synchronises(tmp_path: Path) -> None:
    """A prefill long enough that the host is far ahead of it: a host clock would be early."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ergmeter.integrations.generate import measure

    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=11008, num_hidden_layers=8,
        num_attention_heads=32, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.randint(1, 1024, (8, 4096))
    tokens = 32
    call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    bare = type(model).generate

    def timed(generate: Any, count: int) -> float:
        torch.cuda.synchronize()
        before_s = time.perf_counter()
        generate(ids, max_new_tokens=count, **call)
        torch.cuda.synchronize()
        return time.perf_counter() - before_s

    hand = []
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        for number in range(9):
            if number == 2:
                meter.mark("warmup_end")
            hand.append((timed(partial(bare, model), 1), timed(model.generate, tokens)))
    first_s, whole_s = (statistics.median(one) for one in zip(*hand[2:], strict=True))
    readings = meter.summary().readings
    ttft, tpot = (readings[f"latency.{name}_median_s"] for name in ("ttft", "tpot"))
    assert isinstance(ttft, Reading), ttft
    assert isinstance(tpot, Reading), tpot
    print(f"ttft {ttft.value:.5f}, by hand {first_s:.5f}; tpot {tpot.value:.5f}; all {whole_s:.5f}")
    assert ttft.value == pytest.approx(first_s, rel=0.05)
    # Of the same calls: the host makes tokens faster and slower from one call to the next.
    assert ttft.value + (tokens - 1) * tpot.value == pytest.approx(whole_s, rel=0.03)
    assert "CUDA events" in ttft.note

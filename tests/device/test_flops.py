"""On a real NVIDIA GPU: every attention kernel counts what the plain products do.

FlopCounterMode raises on grouped queries through most of these kernels in torch 2.11, and what it
does not raise on it counts with the kernels' own recomputation; what it said is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ergmeter.flops.analytic import PartFlops

pytestmark = pytest.mark.device

BATCH, HEADS, LENGTH, DIM = 2, 8, 128, 64
ONCE = 4 * BATCH * HEADS * LENGTH * LENGTH * DIM  # scores and values, forward


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


@pytest.fixture(scope="module")
def counter() -> Any:  # the class, which can only be imported where torch is
    from ergmeter.flops.counted.count import Counter

    return Counter


def heads(torch: Any, keys: int, *, dtype: Any = None) -> tuple[Any, Any, Any]:
    def made(count: int) -> Any:
        return torch.randn(
            BATCH,
            count,
            LENGTH,
            DIM,
            device="cuda",
            dtype=dtype or torch.bfloat16,
            requires_grad=True,
        )

    return made(HEADS), made(keys), made(keys)


def torchs(torch: Any, run: Callable[[], Any]) -> str:
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with FlopCounterMode(display=False) as theirs:
            run()
    except AssertionError as error:
        return f"raises {error}"[:60]
    return f"{theirs.get_total_flops() / (3 * ONCE):.3f} of it"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [HEADS, 2, 1])
@pytest.mark.parametrize(
    "kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]
)
def test_every_kernel_of_sdpa_counts_alike(
    torch: Any, counter: Any, kernel: str, keys: int, is_causal: bool
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = heads(torch, keys)

    def run() -> None:
        if kernel == "EFFICIENT_ATTENTION":  # it knows no groups
            wide = [x.repeat_interleave(HEADS // keys, 1) for x in (k, v)]
        else:
            wide = [k, v]
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, *wide, is_causal=is_causal, enable_gqa=wide[0] is k and keys < HEADS)
        out.sum().backward()

    with sdpa_kernel(getattr(SDPBackend, kernel)):
        try:
            run()
        except RuntimeError as error:
            pytest.skip(f"{kernel} does not run here: {str(error)[:80]}")
        with counter() as ours:
            run()
        said = torchs(torch, run)
    counted = ours.counted()
    print(f"\n{kernel}, {HEADS} query heads on {keys}: FlopCounterMode {said}")
    assert (counted.total.forward, counted.total.backward) == (ONCE, 2 * ONCE)
    assert counted.total.recomputed == (0 if kernel == "MATH" else ONCE / 2)
    assert not counted.not_counted


@pytest.mark.parametrize("way", ["forward", "both"])
def test_flex_attention_counts_alike(
    torch: Any, counter: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    from torch.nn.attention import flex_attention as flex

    # Left to itself it compiles itself, which torch refuses under any counter.
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(flex, name):
        pytest.skip("flex_attention of this torch can't be run uncompiled")
    monkeypatch.setattr(flex, name, True)
    q, k, v = heads(torch, 2)

    def run() -> None:
        attended: Any = flex.flex_attention(q, k, v, enable_gqa=True)
        if way == "both":
            attended.sum().backward()

    try:
        run()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"flex_attention does not run uncompiled here: {str(error)[:80]}")
    with counter() as ours:
        run()
    assert ours.counted().total.model == (3 * ONCE if way == "both" else ONCE)
    assert not ours.counted().not_counted


def test_sequences_end_to_end_count_by_their_own_lengths(torch: Any, counter: Any) -> None:
    lengths = [40, 88, 128]
    starts = torch.tensor([0, 40, 128, 256], device="cuda", dtype=torch.int32)
    q, k, v = (
        torch.randn(256, HEADS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    forward = torch.ops.aten._flash_attention_forward
    with counter() as ours:
        out = forward(q, k, v, starts, starts, 128, 128, 0.0, False, False)[0]
        out.sum().backward()
    once = 4 * HEADS * DIM * sum(length**2 for length in lengths)
    assert ours.counted().total.model == 3 * once


def test_grouped_products_count_by_their_rows(torch: Any, counter: Any) -> None:
    rows, inner, outer, groups = 256, 64, 128, 4
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(groups, inner, outer, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 96, 240, rows], device="cuda", dtype=torch.int32)

    def run() -> None:
        torch._grouped_mm(x, w, offs=ends).square().sum().backward()

    with counter() as ours:
        run()
    print(f"\ngrouped_mm: FlopCounterMode {torchs(torch, run)}")
    assert ours.counted().total == PartFlops(2 * rows * inner * outer, 4 * rows * inner * outer, 0)


def test_a_model_on_the_gpu_is_counted_without_running_there(torch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from ergmeter.flops.counted.count import Counter, count

    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=1024,
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = torch.cuda.get_rng_state()
    counted = count(model, batch_size=2, seq_len=128)
    assert torch.cuda.max_memory_allocated() == held
    assert torch.equal(torch.cuda.get_rng_state(), state)
    ids = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    with Counter() as ours:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    sums, by_count = ours.counted().total, counted.total
    assert (sums.forward, sums.backward) == (by_count.forward, by_count.backward)


def test_four_bit_layers_count_like_plain_ones(torch: Any, counter: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from ergmeter.flops.counted.count import count

    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.bfloat16).cuda()
    net = torch.nn.Sequential(torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16), layer)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    forward = 2 * 32 * 64 * (64 + 128)
    assert count(net, inputs=(x,)).total.forward == forward
    with torch.no_grad(), counter() as ours:
        net(x)
    assert ours.counted().total.forward == forward

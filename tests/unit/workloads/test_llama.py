"""What the demo's model promises: shape, causality, relative positions, shared heads, learning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it

from ergmeter.workloads.demo_training import (
    LARGE,
    SMALL,
    Llama,
    LlamaConfig,
    LlamaLayer,
    Size,
    rotated,
    rotation,
)

TINY = LlamaConfig(
    vocabulary=11, width=16, layers=2, heads=4, kv_heads=2, hidden=24, context=32, rotary_base=100.0
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, TINY.vocabulary, (rows, length))


def test_every_position_gets_a_logit_for_every_token() -> None:
    assert Llama(TINY)(tokens(3, 7)).shape == (3, 7, 11)


def test_a_later_token_does_not_change_earlier_logits_and_does_change_its_own() -> None:
    model = Llama(TINY)
    before = tokens(1, 9)
    after = before.clone()
    after[0, 5] = (after[0, 5] + 1) % TINY.vocabulary
    first, second = model(before), model(after)
    torch.testing.assert_close(first[:, :5], second[:, :5], rtol=0, atol=1e-6)
    assert ((first - second)[:, 5:].abs().amax(dim=-1) > 1e-5).all()


def test_an_earlier_token_is_seen_by_later_positions() -> None:
    attention = LlamaLayer(TINY).attention
    cos, sin = rotation(6, TINY.head_width, TINY.rotary_base)
    before = torch.randn(1, 6, TINY.width)
    after = before.clone()
    after[0, 0] += 1
    moved = (attention(before, cos, sin) - attention(after, cos, sin)).abs().amax(dim=-1)
    assert (moved > 1e-4).all()


@pytest.mark.parametrize("shift", [1, 7, 20])
def test_rotated_scores_depend_on_the_distance_and_not_on_the_place(shift: int) -> None:
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = rotation(32, 8, 100.0)

    def score(at: int, to: int) -> float:
        return float(rotated(q, cos[at], sin[at]) @ rotated(k, cos[to], sin[to]))

    assert score(9 + shift, 4 + shift) == pytest.approx(score(9, 4), abs=1e-4)
    assert abs(score(9 + shift, 4) - score(9, 4)) > 1e-2


def test_rotation_keeps_lengths_and_leaves_position_zero_alone() -> None:
    x = torch.randn(5, 8)
    turned = rotated(x, *rotation(5, 8, 100.0))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[0], x[0])
    assert (turned[1:] - x[1:]).abs().amax(dim=-1).min() > 1e-3


def test_the_slowest_pair_turns_at_the_base_s_rate() -> None:
    cos, sin = rotation(4, 4, 100.0)
    # Pairs turn at base ** (-2 i / head_width): 1 and 100 ** -0.5 = 0.1 radians a position.
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2], [3.0, 0.3]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_shared_heads_are_full_attention_with_repeated_keys_and_values() -> None:
    shared = LlamaLayer(TINY)
    full = LlamaLayer(LlamaConfig(11, 16, 2, 4, 4, 24, 32))
    weights = shared.state_dict()
    twice = {name: heads_twice(weights[name]) for name in ("k.weight", "v.weight")}
    full.load_state_dict({**weights, **twice})
    x = torch.randn(2, 9, TINY.width)
    cos, sin = rotation(9, TINY.head_width, TINY.rotary_base)
    torch.testing.assert_close(shared.attention(x, cos, sin), full.attention(x, cos, sin))


def heads_twice(weight: torch.Tensor) -> torch.Tensor:
    """Rows of heads a, b to rows of heads a, a, b, b: queries 0 and 1 share the first."""
    a, b = weight[: TINY.head_width], weight[TINY.head_width :]
    return torch.cat((a, a, b, b))


def test_attention_is_softmax_of_scaled_products_written_out() -> None:
    config = LlamaConfig(11, 4, 1, 1, 1, 8, 8)
    layer = LlamaLayer(config)
    x = torch.randn(1, 3, 4)
    cos, sin = rotation(3, 4, config.rotary_base)
    q, k = (rotated(project(x[0]), cos, sin) for project in (layer.q, layer.k))
    v = layer.v(x[0])
    rows = [torch.softmax(q[i] @ k[: i + 1].T / 4**0.5, dim=0) @ v[: i + 1] for i in range(3)]
    torch.testing.assert_close(layer.attention(x, cos, sin)[0], layer.out(torch.stack(rows)))


def test_the_feed_forward_part_is_gated_written_out() -> None:
    layer = LlamaLayer(TINY)
    x = torch.randn(3, TINY.width)
    gate, up = x @ layer.gate.weight.T, x @ layer.up.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T
    torch.testing.assert_close(layer.feed_forward(x), expected)


# On a GPU only: some virtual machines name the CPU's bf16 instructions and die of them.
@pytest.mark.device
def test_bf16_autocast_gives_the_same_answer_to_bf16_s_precision() -> None:
    model, given = Llama(TINY).cuda(), tokens().cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        coarse = model(given)
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse.float(), model(given), rtol=0.05, atol=0.01)


def test_parameters_by_hand() -> None:
    # Embedding 11 x 16 = 176, the tied head is the same. A layer: q and out 2 x 16 x 16 = 512,
    # k and v 2 x 16 x 8 = 256, SwiGLU 3 x 16 x 24 = 1152, norms 2 x 16 = 32: 1952. Last norm 16.
    assert TINY.parameters == 176 + 2 * 1952 + 16
    assert sum(weight.numel() for weight in Llama(TINY).parameters()) == 4096


@pytest.mark.parametrize(("size", "parameters"), [(SMALL, 586_624), (LARGE, 90_457_088)])
def test_the_demo_s_models_have_the_parameters_they_state(size: Size, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(size.model)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert size.model.parameters == parameters


def test_it_learns_a_small_batch_by_heart() -> None:
    model, batch = Llama(TINY), tokens(2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.4, abs=0.1)  # ln 11: it knew nothing
    assert losses[-1] < losses[0] / 20

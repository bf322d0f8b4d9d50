"""The counter against counts by hand, against torch's own where that is right, and on live models.

The eager implementation of a model is made of plain products, which torch counts rightly; it is
what the others are held against.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.flops.analytic import PartFlops
from ergmeter.flops.counted.built_model import count_config
from ergmeter.flops.counted.count import CountedStep, Counter, count

transformers: Any = hf
HIDDEN, LAYERS, HEADS, KEYS, FEED, WORDS = 64, 3, 4, 2, 160, 256
BATCH, LENGTH = 2, 24


def config(**more: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "intermediate_size": FEED,
        "vocab_size": WORDS,
    }
    return transformers.LlamaConfig(**(sizes | more))


def llama(attention: str = "sdpa", **more: Any) -> Any:
    return transformers.LlamaForCausalLM._from_config(config(**more), attn_implementation=attention)


def mixtral(experts: str) -> Any:
    made = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        intermediate_size=FEED,
        vocab_size=WORDS,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.MixtralForCausalLM._from_config(made, attn_implementation="eager")
    model.config._experts_implementation = experts
    return model


def tokens(batch: int = BATCH, length: int = LENGTH) -> Any:
    return torch.zeros(batch, length, dtype=torch.long)


def really(model: Any, **inputs: Any) -> CountedStep:
    """CountedStep on real tensors, as they are computed."""
    with Counter() as counter:
        model(**(inputs or {"input_ids": tokens()}), use_cache=False).logits.sum().backward()
    return counter.counted()


def torchs(model: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens(), use_cache=False).logits.sum().backward()
    total: int = counter.get_total_flops()
    return total


# What a layer of the small Llama costs, by hand.
ROWS = BATCH * LENGTH
QKVO = 2 * ROWS * HIDDEN * (2 * HIDDEN + 2 * HIDDEN * KEYS // HEADS)
CORE = 4 * BATCH * LENGTH * LENGTH * HIDDEN
MLP = 3 * 2 * ROWS * HIDDEN * FEED
HEAD = 2 * ROWS * HIDDEN * WORDS
FORWARD = LAYERS * (QKVO + CORE + MLP) + HEAD


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0


# -- the same number on every path -----------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_costs_what_it_costs_by_hand(attention: str) -> None:
    counted = count(llama(attention), batch_size=BATCH, seq_len=LENGTH)
    assert (counted.total.forward, counted.total.backward) == (FORWARD, 2 * FORWARD)
    assert counted.total.model == torchs(llama("eager"))
    assert counted.params == counted.params_trained == llama().num_parameters()


def test_attention_is_counted_on_a_cpu_where_torch_has_no_rule() -> None:
    assert really(llama("sdpa")).total.model == 3 * FORWARD
    assert torchs(llama("sdpa")) == 3 * (FORWARD - LAYERS * CORE)


def test_what_a_fused_kernel_computes_again_is_hardwares() -> None:
    counted = count(llama("sdpa"), batch_size=BATCH, seq_len=LENGTH)
    assert counted.total.recomputed == LAYERS * CORE / 2  # the scores, half of the core
    assert counted.total.hardware == counted.total.model + counted.total.recomputed
    with sdpa_kernel(SDPBackend.MATH):
        assert really(llama("sdpa")).total == PartFlops(FORWARD, 2 * FORWARD, 0)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_grouped_queries_cost_by_their_own_number(heads: int) -> None:
    q: Any = torch.zeros(2, 8, 16, 32, requires_grad=True)
    k, v = (torch.zeros(2, heads, 16, 32, requires_grad=True) for _ in range(2))
    with Counter() as counter:
        attended: Any = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        attended.sum().backward()
    forward = 4 * 2 * 8 * 16 * 16 * 32
    assert counter.counted().total.model == 3 * forward


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "qkv"])
def test_only_gradients_that_are_asked_for_are_the_models(wanted: str) -> None:
    def run(backend: Any) -> PartFlops:
        q, k, v = (torch.zeros(1, 2, 8, 16, requires_grad=name in wanted) for name in "qkv")
        with sdpa_kernel(backend), Counter() as counter:
            attended: Any = nn.functional.scaled_dot_product_attention(q, k, v)
            attended.sum().backward()
        return counter.counted().total

    fused, plain = run(SDPBackend.FLASH_ATTENTION), run(SDPBackend.MATH)
    assert (fused.forward, fused.backward) == (plain.forward, plain.backward)
    assert plain.recomputed == 0 < fused.recomputed
    assert fused.backward + fused.recomputed == 2.5 * fused.forward  # five products are computed


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_cost_the_same_however_they_are_run(experts: str) -> None:
    eager = torchs(mixtral("eager"))
    assert really(mixtral(experts)).total.model == eager
    assert count(mixtral(experts), batch_size=BATCH, seq_len=LENGTH).total.model == eager
    if experts == "grouped_mm":
        assert torchs(mixtral(experts)) < 0.6 * eager


def test_a_loop_over_experts_is_counted_without_knowing_where_tokens_go() -> None:
    model = mixtral("eager")
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.model == torchs(model)
    assert model.config._experts_implementation == "eager"


def test_flex_attention_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as flex

    # Without this it compiles itself, which torch refuses under any counter.
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k = torch.zeros(2, 8, 16, 32), torch.zeros(2, 2, 16, 32)
    with Counter() as counter:
        flex.flex_attention(q, k, k, enable_gqa=True)
    assert counter.counted().total.forward == 4 * 2 * 8 * 16 * 16 * 32


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "somebodys/kernel"])
def test_kernels_that_need_a_device_are_counted_without_one(attention: str) -> None:
    model = llama()
    model.config._attn_implementation_internal = attention
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.model == 3 * FORWARD
    assert model.config._attn_implementation == attention


def test_a_depthwise_convolution_costs_the_same_each_way() -> None:
    conv = nn.Conv1d(12, 12, 4, groups=12, padding=3)
    x = torch.zeros(2, 12, 10, requires_grad=True)
    with Counter() as counter:
        conv(x).sum().backward()
    once = 2 * 2 * 12 * 13 * 4  # 13 positions out
    assert counter.counted().total == PartFlops(once, 2 * once, 0)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda: torch.zeros(3, 4) @ torch.zeros(4, 5), 2 * 3 * 4 * 5),
        (lambda: torch.zeros(3, 4) @ torch.zeros(4), 2 * 3 * 4),
        (lambda: torch.zeros(4) @ torch.zeros(4), 2 * 4),
        (lambda: torch.einsum("bij,bjk->bik", torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)), 240),
        (lambda: nn.functional.conv2d(torch.zeros(1, 4, 8, 8), torch.zeros(6, 2, 3, 3), groups=2),
         2 * 6 * 36 * 2 * 9),
        (lambda: nn.functional.conv_transpose1d(torch.zeros(1, 4, 8), torch.zeros(4, 6, 3)),
         2 * 4 * 8 * 6 * 3),
        (lambda: nn.LSTM(4, 8)(torch.zeros(5, 3, 4)), 2 * 15 * (4 + 8) * 32),
        (lambda: torch.addbmm(torch.zeros(3, 5), torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)), 240),
        (lambda: torch.zeros(3, 4) + torch.zeros(4), 0),
    ],
)  # fmt: skip
def test_an_operator_costs_what_its_shapes_say(call: Callable[[], Any], flops: int) -> None:
    with Counter() as counter:
        call()
    assert counter.counted().total.forward == flops
    assert not counter.counted().not_counted


def test_inference_mode_hides_no_product() -> None:
    with torch.inference_mode(), Counter() as counter:
        nn.Linear(8, 4)(torch.zeros(3, 8))
    assert counter.counted().total.forward == 2 * 3 * 8 * 4


# -- what is trained, what is kept -----------------------------------------------------------------


def test_frozen_layers_have_no_gradients_of_their_own_and_none_below_the_last_trained() -> None:
    model = llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    counted = count(model, batch_size=BATCH, seq_len=LENGTH)
    assert counted.total == PartFlops(FORWARD, HEAD, 0)
    model.model.layers[-1].mlp.down_proj.requires_grad_(True)
    down = 2 * ROWS * HIDDEN * FEED
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.backward == 2 * HEAD + down


def test_lora_costs_what_it_costs_by_hand() -> None:
    peft = pytest.importorskip("peft")
    rank = 4
    adapted = peft.get_peft_model(
        llama("eager"), peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
    )
    counted = count(adapted, batch_size=BATCH, seq_len=LENGTH)
    kv = HIDDEN * KEYS // HEADS
    down, up = 2 * 2 * ROWS * HIDDEN * rank, 2 * ROWS * rank * (HIDDEN + kv)  # both of q and v
    assert counted.total.forward == FORWARD + LAYERS * (down + up)
    # Frozen matrices pass gradients on; the first layer's three, and its adapters' inputs, have
    # nobody to pass them to, and of its keys nobody wants any.
    frozen = LAYERS * (QKVO + MLP) + HEAD - 2 * ROWS * HIDDEN * (HIDDEN + 2 * kv)
    core = LAYERS * 2 * CORE - CORE / 2
    assert counted.total.backward == frozen + core + LAYERS * 2 * (down + up) - down
    assert counted.params_trained == LAYERS * rank * (3 * HIDDEN + kv)
    assert counted.total.model == torchs(adapted)


def test_checkpointing_is_hardwares_and_not_the_models() -> None:
    model = llama("eager")
    plain = count(model, batch_size=BATCH, seq_len=LENGTH)
    model.gradient_checkpointing_enable()
    again = count(model, batch_size=BATCH, seq_len=LENGTH)
    assert plain.total.recomputed == 0
    assert (again.total.forward, again.total.backward) == (
        plain.total.forward,
        plain.total.backward,
    )
    down = 2 * ROWS * HIDDEN * FEED  # torch stops before a layer's last product
    assert again.total.recomputed == LAYERS * (QKVO + CORE + MLP - down)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_both_kinds_of_checkpoint_are_told_from_gradients(is_reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            both = lambda x: self.second(self.first(x).relu()).relu()  # noqa: E731
            return checkpoint(both, x.requires_grad_(), use_reentrant=is_reentrant)

    counted = count(Twice(), inputs=(torch.zeros(3, 8),))
    once = 2 * 3 * 8 * 8
    assert counted.total == PartFlops(2 * once, 4 * once, 2 * once)
    assert counted.own["first"] == PartFlops(once, 2 * once, once)


def test_a_forward_pass_alone_has_no_way_back() -> None:
    counted = count(llama(), batch_size=BATCH, seq_len=LENGTH, train=False)
    assert counted.total == PartFlops(FORWARD, 0, 0)


# -- packed weights --------------------------------------------------------------------------------


def quantized(kind: str) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = llama("eager")
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            packed = getattr(bitsandbytes.nn, kind)(
                layer.in_features, layer.out_features, bias=False
            )
            packed.load_state_dict(layer.state_dict())
            model.model.set_submodule(name, packed.to("cpu"))
            packed.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_packed_weights_cost_what_plain_ones_do(kind: str) -> None:
    model = quantized(kind)
    counted = count(model, batch_size=BATCH, seq_len=LENGTH)
    assert counted.total.forward == FORWARD
    assert counted.params == llama().num_parameters()
    assert counted.assumptions == (f"{kind} layers are counted as the plain layers they stand for",)
    # The norms and the embedding are trained, so gradients pass through all, and stay in the head.
    assert counted.total.backward == 2 * FORWARD - LAYERS * (QKVO + MLP)
    with torch.no_grad(), Counter() as counter:
        model(input_ids=tokens(), use_cache=False)
    assert counter.counted().total.forward == FORWARD
    assert not counter.counted().not_counted


def test_qlora_counts_like_lora() -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")

    def adapted(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    packed = count(adapted(quantized("Linear4bit")), batch_size=BATCH, seq_len=LENGTH)
    plain = count(adapted(llama("eager")), batch_size=BATCH, seq_len=LENGTH)
    assert packed.total == plain.total
    assert packed.params == plain.params


# -- a live model is left alone --------------------------------------------------------------------


def test_a_live_model_is_not_touched() -> None:
    model = llama(attention_dropout=0.1)
    model.eval()
    fired: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: fired.append(1))
    model.register_full_backward_hook(lambda *_: fired.append(1))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    state, versions = torch.get_rng_state(), [p._version for p in model.parameters()]
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    count(model, batch_size=BATCH, seq_len=LENGTH)
    assert not fired
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert [p._version for p in model.parameters()] == versions
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before


def test_a_compiled_model_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    compiled: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager")
    x = torch.zeros(2, 8)
    before = dict(counters["frames"])
    counted = count(compiled, inputs=(x,))
    assert counted.total == PartFlops(256, 256, 0)
    assert dict(counters["frames"]) == before
    compiled(x)
    frames = counters["frames"]["ok"]
    assert frames == before.get("ok", 0) + 1  # it was the first call, and was compiled
    count(compiled, inputs=(torch.zeros(5, 8),))
    compiled(x)
    assert counters["frames"]["ok"] == frames


def test_a_model_compiled_in_place_is_counted_and_stays_so() -> None:
    model = nn.Linear(8, 8)
    model.compile(backend="eager")
    assert count(model, inputs=(torch.zeros(2, 8),)).total.forward == 256
    assert model._compiled_call_impl is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_a_compiled_function_inside_a_model_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    doubled = torch.compile(lambda x: x.relu() * 2, backend="eager")

    class Inside(nn.Linear):
        def forward(self, x: Any) -> Any:
            return doubled(super().forward(x))

    model, x = Inside(8, 8), torch.zeros(2, 8)
    before = counters["frames"].get("ok", 0)
    assert count(model, inputs=(x,)).total.forward == 256
    assert counters["frames"].get("ok", 0) == before
    model(x)
    assert counters["frames"]["ok"] == before + 1


def test_layers_that_accelerate_moves_about_are_counted() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(llama(), {"": "cpu"}, force_hooks=True)
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.model == 3 * FORWARD


def test_what_the_caller_has_switched_on_does_not_matter() -> None:
    plain = count(llama(), batch_size=BATCH, seq_len=LENGTH)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert count(llama(), batch_size=BATCH, seq_len=LENGTH) == plain
    with FlopCounterMode(display=False) as theirs, torch.device("meta"):
        assert count(llama(), batch_size=BATCH, seq_len=LENGTH) == plain
    assert theirs.get_total_flops() == 0


def test_types_may_be_mixed_as_autocast_lets_them() -> None:
    model = llama()
    model.model.layers.to(torch.bfloat16)
    counted = count(model, batch_size=BATCH, seq_len=LENGTH)
    assert counted.total.model == 3 * FORWARD


def test_a_forward_that_was_replaced_on_the_model_runs_in_the_copy() -> None:
    model: Any = nn.Linear(8, 8)
    original = type(model).forward
    model.forward = lambda self, x: original(self, x * 2)  # as a bound method
    model.forward = model.forward.__get__(model)
    assert count(model, inputs=(torch.zeros(2, 8),)).total.forward == 256
    kept: Any = nn.Linear(8, 8)
    kept.forward = lambda x: original(kept, x)  # a function that holds on to the model
    assert count(kept, inputs=(torch.zeros(2, 8),)).total.forward == 256
    assert kept.weight.grad is None


# -- inputs ----------------------------------------------------------------------------------------


def test_a_batch_of_ones_own_gives_its_shapes() -> None:
    ids = tokens()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert count(llama(), inputs=batch).total.model == 3 * FORWARD
    packed = {"input_ids": ids, "position_ids": ids}
    assert count(llama(), inputs=packed).total.model == 3 * FORWARD


def test_encoder_decoders_take_two_lengths() -> None:
    made = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100
    )
    model = transformers.T5ForConditionalGeneration(made)
    counted = count(model, batch_size=2, seq_len=6, source_len=10)
    inputs = {"input_ids": tokens(2, 10), "decoder_input_ids": tokens(2, 6)}
    assert counted.total.model == really(model, **inputs).total.model


def test_any_module_is_counted_on_example_inputs() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    x = torch.zeros(3, 5, 32)
    forward = 2 * (2 * 15 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 3 * 5 * 5 * 32)
    for train in (True, False):
        assert count(net, inputs=(x,), train=train).total.forward == forward
    given = count(net, inputs={"src": x}, loss=lambda out: out[:, 0].mean())
    assert given.total.forward == forward


def test_a_table_by_module_adds_up() -> None:
    counted = count(llama(), batch_size=BATCH, seq_len=LENGTH)
    table = counted.modules()
    assert table[""] == counted.total
    assert table["model"] + table["lm_head"] == counted.total
    layers = [table[f"model.layers.{number}"] for number in range(LAYERS)]
    assert sum(layers, PartFlops()) == table["model"]
    assert layers[0].model == 3 * (QKVO + CORE + MLP)
    assert table["model.layers.0.mlp.up_proj"] == PartFlops(MLP / 3, 2 * MLP / 3, 0)
    assert set(counted.modules(depth=1)) == {"", "model", "lm_head"}
    assert sum(counted.operators.values(), PartFlops()) == counted.total


# -- what can't be counted -------------------------------------------------------------------------


def test_a_product_without_a_rule_is_named_and_not_passed_over() -> None:
    make: Any = torch.library.Library
    library = make("ergmeter_test", "DEF")
    library.define("fused_matmul(Tensor a, Tensor b) -> Tensor")
    library.impl("fused_matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    with Counter() as counter:
        for _ in range(3):
            torch.ops.ergmeter_test.fused_matmul(torch.zeros(2, 3), torch.zeros(3, 4))
    assert counter.counted().total.forward == 0
    assert counter.counted().not_counted == ("not counted: ergmeter_test::fused_matmul x 3",)


class Decides(nn.Linear):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (lambda: count(Decides(8, 8), inputs=(torch.zeros(1, 8),)), NotMeasurable, "values"),
        (lambda: count(nn.Linear(8, 8), inputs=(torch.zeros(1, 7),)), NotMeasurable, "inputs="),
        (
            lambda: count(nn.Linear(8, 8), batch_size=1, seq_len=8),
            UsageError,
            "neither input_ids nor",
        ),
        (
            lambda: count(nn.Bilinear(8, 8, 8), batch_size=1, seq_len=8),
            UsageError,
            r"neither input_ids nor.*\(it needs input1, input2\)",
        ),
        (lambda: count(llama(), batch_size=0, seq_len=8), UsageError, "batch_size"),
        (lambda: count(llama(), batch_size=1), UsageError, "seq_len"),
        (
            lambda: count(llama().requires_grad_(False), batch_size=1, seq_len=8),
            UsageError,
            "train=False",
        ),
        (
            lambda: count_config({"model_type": "llamma"}, batch_size=1, seq_len=8),
            FormatError,
            "llamma",
        ),
    ],
)
def test_a_refusal_says_why(run: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run()


# -- changed models --------------------------------------------------------------------------------


def test_a_model_that_was_changed_is_counted_as_it_is_now() -> None:
    model = llama()
    first = count(model, batch_size=BATCH, seq_len=LENGTH)
    assert count(model, batch_size=BATCH, seq_len=LENGTH) == first
    model.lm_head.requires_grad_(False)
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.backward < first.total.backward
    model.lm_head = nn.Linear(HIDDEN, 2 * WORDS, bias=False)
    assert count(model, batch_size=BATCH, seq_len=LENGTH).total.forward == FORWARD + HEAD


def test_a_counted_model_is_not_kept_alive() -> None:
    model = llama()
    count(model, batch_size=BATCH, seq_len=LENGTH)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_configuration_is_counted_like_its_model() -> None:
    made = config()
    counted = count_config(made, batch_size=BATCH, seq_len=LENGTH)
    assert counted.total == count(llama(), batch_size=BATCH, seq_len=LENGTH).total
    as_json = made.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert (
        count_config(as_json, batch_size=BATCH, seq_len=LENGTH).total.model == counted.total.model
    )

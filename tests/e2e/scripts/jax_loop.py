"""A tiny decoder in Flax, trained on padded rows of random tokens with optax.

    jax_loop.py plain|metered...

One after the other. Writes to plain.json and metered.json what each loop did by its own count and
clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

EPOCHS, BATCHES, MICRO, BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 2, 40, 2, 4, 32, 128, 32, 3
EVERY = 10  # batches between two looks at the loss


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: None) -> tuple[Any, None]:
        mask = linen.make_causal_mask(x[..., 0])
        x = x + linen.SelfAttention(num_heads=2, qkv_features=WIDTH)(linen.LayerNorm()(x), mask)
        y = linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))
        return x + linen.Dense(WIDTH)(linen.gelu(y)), None


class Decoder(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH)(ids)
        # One layer, scanned: a count that takes a loop's body once sees a third of it.
        scanned = linen.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = scanned()(x, None)
        return linen.Dense(VOCABULARY, use_bias=False)(x)


asked_s: list[float] = []  # when the first batch of each epoch was asked for


def rows(epoch: int) -> Any:
    chance = np.random.default_rng(epoch)
    asked_s.append(time.monotonic())
    for _ in range(BATCHES):
        ids = chance.integers(0, VOCABULARY, (BATCH, LENGTH))
        lengths = chance.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))
        mask = (np.arange(LENGTH) < lengths).astype(np.int32)
        yield {"input_ids": ids, "attention_mask": mask}


def loss_of(params: Any, batch: Any) -> Any:
    logits: Any = Decoder().apply(params, batch["input_ids"])
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], batch["input_ids"][:, 1:]
    )
    kept = batch["attention_mask"][:, 1:]
    return (each * kept).sum() / kept.sum()


OPTIMIZER = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=MICRO)


@jax.jit
def train_step(params: Any, state: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(params, batch)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


def main(how: str) -> None:
    params = jax.jit(Decoder().init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    state = OPTIMIZER.init(params)
    first = next(rows(0))
    lowered = train_step.lower(params, state, first)
    train_step(params, state, first)[2].block_until_ready()  # compiled before the clock runs
    training: Any = None
    if how == "metered":
        from ergmeter.integrations.jax import JaxTraining

        training = JaxTraining(
            parameters=params, flops=lowered, micro_steps=MICRO, probes=["process"]
        )
    losses, real, computed, amids_s = [], [], [], []
    asked_s.clear()
    for epoch in range(EPOCHS):
        for number, batch in enumerate(training(rows(epoch)) if training else rows(epoch)):
            amids_s.append(time.monotonic())
            params, state, loss = train_step(params, state, batch)
            losses.append(loss)
            real.append(int(batch["attention_mask"].sum()))
            computed.append(batch["input_ids"].size)
            if number % EVERY == EVERY - 1:
                loss.block_until_ready()
            if training:
                training.logged(loss=loss)
    end_s = time.monotonic()
    by_xla: Any = lowered.compile().cost_analysis() if training else {}
    said = {
        "losses": [float(one) for one in losses],
        "real": real,
        "computed": computed,
        "outside_s": [asked_s[0], end_s],
        "inside_s": [amids_s[0], amids_s[-1]],
        "parameters": sum(one.size for one in jax.tree.leaves(params)),
        "xla_flops": by_xla.get("flops"),
    }
    Path(f"{how}.json").write_text(json.dumps(said))


for how in sys.argv[1:]:
    main(how)

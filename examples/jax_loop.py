"""A loop of JAX with Flax and optax, measured: one line more, and the loader inside it.

python examples/jax_loop.py

jax returns before the work is done, so step times are the host's; they add up to the right total.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ergmeter.integrations.jax import JaxTraining

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 60, 8, 64, 256, 64


class Words(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids):
        return self.head(nnx.gelu(self.inner(self.table(ids))))


structure, params = nnx.split(Words(nnx.Rngs(0)))
adamw = optax.adamw(1e-3)
state = adamw.init(params)


@jax.jit
def train_step(params, state, ids):
    def loss_of(params):
        logits = nnx.merge(structure, params)(ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, state = adamw.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


def loader():
    chance = np.random.default_rng(0)
    for _ in range(STEPS):
        yield jnp.asarray(chance.integers(0, VOCABULARY, (BATCH, LENGTH)))


lowered = train_step.lower(params, state, next(loader()))  # optional: gives FLOPs
training = JaxTraining(parameters=params, flops=lowered, warmup_steps=3)
for ids in training(loader()):
    params, state, loss = train_step(params, state, ids)
    training.logged(loss=loss)  # optional; nobody waits for it

print(training.summary().readings["throughput.tokens_per_s"])
print(f"erg report {training.path}")

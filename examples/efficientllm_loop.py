"""A Megatron-style loop with the calls of EfficientLLM's metrics: only the import line is new.

python examples/efficientllm_loop.py
"""

import torch

from ergmeter import Run, summarize
from ergmeter.integrations.efficientllm import (
    finalize_efficientllm_metrics,
    get_metrics_collector,
    initialize_efficientllm_metrics,
    should_log_metrics,
)

ITERATIONS, BATCH, LENGTH, VOCABULARY = 20, 4, 64, 256

model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters())
tensorboard_writer = None  # torch.utils.tensorboard.SummaryWriter("tensorboard")


def train_step():
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


total_model_parameters = sum(parameter.numel() for parameter in model.parameters())
initialize_efficientllm_metrics(total_model_parameters)
metrics_collector = get_metrics_collector()

for iteration in range(1, ITERATIONS + 1):
    metrics_collector.record_iteration_start()
    loss = train_step()
    metrics_collector.record_iteration_end(BATCH * LENGTH, BATCH)
    if should_log_metrics(iteration):
        metrics_collector.log_metrics(iteration, loss, tensorboard_writer)

finalize_efficientllm_metrics()
print(summarize(Run.open(metrics_collector.run_path)).readings["throughput.tokens_per_s"])

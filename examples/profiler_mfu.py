"""What a profiler MFU monitor's own test looks at: the function, the monitor, and what both cost.

python examples/profiler_mfu.py
"""

import time
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter import Run, summarize
from ergmeter.integrations.monitor import TrainingMonitor, calculate_mfu_with_profiler

STEPS, BATCH, LENGTH = 20, 4, 64
# A CPU has no row in the table of peaks: here a round number stands for it.
PLACE, PEAK = (("cuda", torch.bfloat16), None) if torch.cuda.is_available() else (("cpu",), 1e12)

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
).to(*PLACE)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# 1. The function. Without a GPU there is no peak: nan, with the reason as a warning.
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    mfu = calculate_mfu_with_profiler(model, batch_size=BATCH, seq_length=LENGTH, step_time=0.1)
print(f"MFU of a step of 0.1 s: {mfu:.4f}", *(f"({one.message})" for one in said))

# 2. The monitor, in a loop: MFU of every step, and a line for every tenth.
config = {
    "model": {"max_sequence_length": LENGTH},
    "deepspeed": {"train_batch_size": BATCH},
    "monitoring": {"flops_profile_freq": 10},
}
monitor = TrainingMonitor("./outputs", config, model=model, peak_flops_per_s=PEAK)
monitor.start_training()
costs_s = {True: [], False: []}
for step in range(1, STEPS + 1):
    ids = torch.randint(0, 256, (BATCH, LENGTH), device=PLACE[0])
    attention_mask = torch.ones_like(ids)
    loss = model(input_ids=ids, attention_mask=attention_mask, labels=ids).loss
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    before_s = time.perf_counter()
    monitor.log_step(step, 0, loss.item(), grad_norm.item(), 1e-3, attention_mask)
    costs_s[step % 10 == 0].append(time.perf_counter() - before_s)
monitor.finish_training()

# 3. The cost, measured: the first call counts the model's FLOPs, the others look them up.
print(f"a logged step costs {min(costs_s[False]) * 1e6:.0f} us", end=", ")
print(f"a profiled one {min(costs_s[True]) * 1e6:.0f} us; the model was run {STEPS} times")
print(summarize(Run.open(monitor.run_path)).readings["utilization.mfu_frac"])
print(f"erg report {monitor.run_path}")

"""`model.generate`, measured: one line beside the program's own.

python examples/generate.py

A tiny Llama with random weights: nothing is downloaded.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter import Meter
from ergmeter.integrations.generate import measure

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
)
prompt = torch.randint(1, 256, (1, 32))

with Meter() as meter:
    measure(model, meter)
    for number in range(10):
        if number == 2:
            meter.mark("warmup_end")
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16)

readings = meter.summary().readings
print("TTFT", readings["latency.ttft_median_s"])
print("TPOT", readings["latency.tpot_median_s"])
print("IT  ", readings["throughput.generated_tokens_per_s"])
print(f"erg report {meter.path}")

"""Readers of model families: each turns a configuration into the description of a model.

`DECODERS` has the readers of decoders by the `model_type` that transformers writes. A
`model_type` that is not listed is an error: no family is read as a similar one.
"""

from ergmeter.flops.families import decoders, hybrids

DECODERS = {**decoders.READERS, **hybrids.READERS}

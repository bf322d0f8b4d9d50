"""FLOPs and memory of a step: from a configuration, a model that is run, or compiled code."""

"""How much work a step is: FLOPs from a configuration, from a run model, from compiled code."""

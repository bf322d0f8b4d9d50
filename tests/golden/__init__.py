"""Golden outputs: what every `erg` command prints for fixed inputs, stored as text.

`corpus.py` lists the cases, `inputs.py` makes their inputs, `running.py` runs a case and `text.py`
turns what it printed and wrote into text. `expected/` has one file per case.
"""

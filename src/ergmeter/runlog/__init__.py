"""The run on disk: the waist that everything is written to and read from.

`docs/run-format.md` specifies it; `format` holds its constants, `writer` writes it, `reader` reads.
Nothing is imported here: who writes a run need not load what reads one.
"""

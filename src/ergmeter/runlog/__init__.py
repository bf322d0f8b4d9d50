"""The run on disk: everything is written to it and read from it.

`docs/run-format.md` specifies it. `format` has its constants and headers, `writer` writes it,
`reader` reads it. Nothing is imported here, so that writing a run does not load the reader.
"""

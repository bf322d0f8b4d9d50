"""The `erg` command: one thin file for each command; the layers below do the work."""

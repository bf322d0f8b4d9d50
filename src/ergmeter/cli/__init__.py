"""The `erg` command: one file a command, thin. Work is done in the layers below."""

"""Importers turn a program's output into records. One module a format; see `ergmeter.ports`."""

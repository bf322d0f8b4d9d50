"""Importers: what a program printed, as records. One module a format; see `ergmeter.ports`."""

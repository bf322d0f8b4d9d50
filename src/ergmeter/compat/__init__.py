"""The interfaces of the original systems that ergmeter replaces, one module each."""

"""What `erg record` runs inside a program that does not import ergmeter."""

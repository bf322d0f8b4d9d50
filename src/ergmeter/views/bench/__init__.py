"""What `erg bench` shows on the terminal."""

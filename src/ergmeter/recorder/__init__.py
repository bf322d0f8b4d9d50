"""`erg record`: a command, its output passed on unchanged, and the measurement around it."""

from ergmeter.recorder.record import Recording, RecordRequest, record

__all__ = ["RecordRequest", "Recording", "record"]

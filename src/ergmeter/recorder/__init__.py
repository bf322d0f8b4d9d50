"""`erg record`: runs a command, passes its output on unchanged, and measures it."""

from ergmeter.recorder.record import Recording, RecordRequest, record

__all__ = ["RecordRequest", "Recording", "record"]

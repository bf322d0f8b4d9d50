"""Writes TensorBoard scalars to a separate event file, beside the script's own.

A reader stops at an incomplete record and loses all that follows, so a record is written whole or
not at all. The usual writer has a queue and a thread, and reports a full disk one call late.
Records are made here with TensorBoard's own code and written at once. Neither torch nor TensorFlow
is needed. Values are 32-bit floats, as in all TensorBoard scalars.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ergmeter.sinks.shared.appended_file import AppendedFile
from ergmeter.sinks.shared.updates import TRACKER, SelectingSink

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from ergmeter.ports import SinkRequest, Update

FOLDER = "tensorboard"


class TensorBoardSink(SelectingSink):
    """Writes one event with all scalars for each update."""

    name = "tensorboard"
    library = "tensorboard"
    options: ClassVar = {**TRACKER, "path": None}

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request)
        folder = Path(self._options["path"] or Path(request.run) / FOLDER)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / f"{name}.{time.monotonic_ns()}.ergmeter")
        self._append(wall_time=time.time(), file_version="brain.Event:2")

    def write(self, update: Update) -> None:
        """Append one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        tagged = self._tagged(update).items()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged]
        if update.is_final:
            values.append(_text(self._names.window, update.window_kind))
        self._append(wall_time=update.wall_s, step=update.step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **event: Any) -> None:  # noqa: ANN401  fields of an Event
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(**event).SerializeToString())
        with self._file.locked():
            self._file.append(record.getvalue())


def _text(tag: str, text: str) -> Summary.Value:
    """Return a text as a summary value for TensorBoard's text plugin."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary.Value(tag=tag, metadata=kind, tensor=tensor)

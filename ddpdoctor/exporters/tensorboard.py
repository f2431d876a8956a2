"""TensorBoard: the report as a text, and numbers of each rank, where the step is the rank."""

from __future__ import annotations

import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ..render import markdown
from ..report.findings import Report
from .figures import counts, per_rank


def export(report: Report, target: str) -> str:
    """Write an event file into the folder `target`."""
    writer = EventFileWriter(target)
    values = [(0, _text("ddpdoctor/report", markdown(report)))]
    for name, number in counts(report).items():
        values.append((0, _scalar(f"ddpdoctor/findings/{name}", number)))
    for name, rank, value in per_rank(report):
        values.append((rank, _scalar(f"ddpdoctor/{name}", value)))
    for step, value in values:
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
        writer.add_event(event)
    writer.close()
    return f"tensorboard --logdir {target}"


def _scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def _text(tag: str, text: str) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=plugin)

"""Hands a report to other tools: TensorBoard, Weights & Biases, OpenTelemetry, plug-ins."""

from __future__ import annotations

from .dispatch import BUILT_IN, GROUP, Exporter, ExportError, check, export

__all__ = ["BUILT_IN", "GROUP", "ExportError", "Exporter", "check", "export"]

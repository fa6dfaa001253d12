"""What happens when the policy acts on an event: one action per module, each called with a
StopReport.
"""

from __future__ import annotations

from .callback import CallbackSink
from .console import ConsoleSink, FastcheckWarning
from .raising import RaisingSink

__all__ = ["CallbackSink", "ConsoleSink", "FastcheckWarning", "RaisingSink"]

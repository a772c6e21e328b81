"""What the streams of a rank are called where they are drawn."""

from __future__ import annotations

import numpy as np

from meshwright.spec.trace.marks import NO_AXIS
from meshwright.spec.trace.timeline import SpanKind, Spans, Timeline

HOST, DEFAULT = -1, 0
"""Numbers of the host and of the stream that computes where nothing else is said."""


def stream_names(timeline: Timeline, spans: Spans) -> dict[int, str]:
    """Return the name of each stream of one rank's `spans`, in the order to draw them: by axis what communicates."""
    names = {}
    for stream in np.unique(spans.stream).tolist():
        own = spans.stream == stream
        if stream in (HOST, DEFAULT):
            names[stream] = "host" if stream == HOST else "compute"
        elif (spans.kind[own] == SpanKind.COMMUNICATION).all():
            axis = int(spans.axis[own][0])
            names[stream] = (timeline.axes[axis] if axis >= 0 else "") or NO_AXIS
        else:
            names[stream] = f"stream {stream}"
    return names

"""CUDA graphs, by cuda.core: launches captured once, and launched together without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Graphs:
    """Captures launches in CUDA graphs of the GPU with CUDA's number `index`."""

    def __init__(self, index: int) -> None:
        from cuda.core import Device

        self._device = Device(index)
        self._device.set_current()
        self.stream = self._device.create_stream()

    def capture(self, enqueue: Callable[[Any], None]) -> Any:
        """Return the graph of what `enqueue` launches on the stream it is given."""
        builder = self._device.create_graph_builder()
        builder.begin_building()
        enqueue(builder)
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        return graph

    def seconds(self, graph: Any) -> float:
        """Launch a graph; return the seconds that the GPU was at it."""
        from cuda.core import EventOptions

        timed = EventOptions(timing_enabled=True)
        start = self.stream.record(options=timed)
        graph.launch(self.stream)
        stop = self.stream.record(options=timed)
        stop.sync()
        return (stop - start) / 1e3

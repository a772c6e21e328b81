"""Exchange of values between the nodes of a run over the store of the rendezvous, which needs no other path."""

import json
import time
from typing import Any

from torch.distributed import Store

from meshwright.spec.machine.node_report import ClockOffset
from meshwright.trainer.cluster.clock_bounds import ClockBounds

_NUM_EXCHANGES = 10


class NodeStore:
    """One node among `num_nodes`; every method is called by all nodes in the same order."""

    def __init__(self, store: Store, node: int, num_nodes: int) -> None:
        self.node, self.num_nodes = node, num_nodes
        self._store, self._num_calls = store, 0

    def put(self, key: str, value: Any) -> None:
        """Set a value that JSON can hold."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return a value once a node has set it; raises RuntimeError where none does within the store's timeout."""
        return json.loads(self._store.get(key))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all nodes, by node, once all have given theirs."""
        self._num_calls += 1
        self.put(f"{self._num_calls}/{self.node}", value)
        return [self.get(f"{self._num_calls}/{node}") for node in range(self.num_nodes)]

    def clock_offsets(self) -> list[ClockOffset]:
        """Return how far the clock of each node is ahead of node 0's; the same list on all nodes."""
        if self.node == 0:
            found = [self._offset_of(node) for node in range(1, self.num_nodes)]
            self.put("clocks", [one.model_dump() for one in found])
            return found
        for number in range(_NUM_EXCHANGES):
            self.get(f"ask/{self.node}/{number}")
            now_s = time.time()
            self.put(f"answer/{self.node}/{number}", now_s)
        return [ClockOffset.model_validate(one) for one in self.get("clocks")]

    def _offset_of(self, node: int) -> ClockOffset:
        """Return the offset of a node by questions that it answers with its time, as NTP does."""
        bounds = ClockBounds()
        for number in range(_NUM_EXCHANGES):
            asked_s = time.time()
            self.put(f"ask/{node}/{number}", asked_s)
            answered_s = self.get(f"answer/{node}/{number}")
            bounds.add(asked_s, answered_s, answered_s, time.time())
        return bounds.offset(node)

"""An in-process network behind `protocol.transport`, with latency, bandwidth, faults and partitions, on trio's clock.

Used by the protocol tests and by the simulator. Nothing here is random unless the caller's fault rule is.
"""

from p2ptrain.memory_network.network import Fault, MemoryNetwork

__all__ = ["Fault", "MemoryNetwork"]

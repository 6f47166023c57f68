"""An in-process implementation of `protocol.wire.transport`, with latency, bandwidth, faults and partitions.

Used by the protocol tests and by the simulator. It runs on trio's clock and is deterministic if the fault rule is.
"""

from p2ptrain.memory_network.network import MemoryNetwork, PacketFault

__all__ = ["MemoryNetwork", "PacketFault"]

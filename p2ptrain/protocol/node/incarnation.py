"""What tells one life of a peer's network side from another: the process, and the number of its node.

Votes belong to one node; what a process remembers of its events outlives them.
"""

from __future__ import annotations


def incarnation_of(process: str, number: int) -> str:
    """Of the node with this number, 0 for the first, in the process that drew the random text `process`."""
    return f"{process}/{number}" if number else process


def process_of(incarnation: str) -> str:
    """The process that a node runs in."""
    return incarnation.partition("/")[0]

"""Incarnations distinguish restarts of a peer: a random text per process, and the number of its node in the process.

Votes belong to one node; the event log belongs to the process.
"""

from __future__ import annotations


def incarnation_of(process: str, number: int) -> str:
    """The incarnation of a process's node number `number`, from 0."""
    return f"{process}/{number}" if number else process


def process_of(incarnation: str) -> str:
    """The process part of an incarnation."""
    return incarnation.partition("/")[0]

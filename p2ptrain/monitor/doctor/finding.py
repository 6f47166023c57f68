"""The result of one check, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Mark(enum.Enum):
    """Result of a check. FAILED: a peer would not work here; WARNING: it would work with limits; SKIPPED: unknown."""

    OK = "✓"
    WARNING = "!"
    FAILED = "✗"
    SKIPPED = "-"


@dataclass(frozen=True)
class Finding:
    """The finding of one check.

    Attributes:
        check: name of the check, one or two words.
        mark: result.
        text: description of what was found.
        remedy: what to do, if possible a command; "" if nothing.
    """

    check: str
    mark: Mark
    text: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"check": self.check, "result": self.mark.name.lower(), "found": self.text, "remedy": self.remedy}


def ok(check: str, text: str) -> Finding:
    return Finding(check, Mark.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Mark.WARNING, text, remedy)


def failed(check: str, error: Exception, remedy: str = "") -> Finding:
    """A failed check. The remedy is what the error says after a semicolon, or else `remedy`."""
    text, _, advice = str(error).partition("; ")
    return Finding(check, Mark.FAILED, text, advice or remedy)


def works(findings: Sequence[Finding]) -> bool:
    """Whether a peer would work."""
    return all(finding.mark is not Mark.FAILED for finding in findings)


def texts(findings: Sequence[Finding]) -> Iterator[str]:
    """Format findings for a terminal: a line each, and the remedy below it."""
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        yield f"{finding.mark.value} {finding.check:<{width}}  {finding.text}"
        if finding.remedy:
            yield f"  {'':<{width}}  → {finding.remedy}"

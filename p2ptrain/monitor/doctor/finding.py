"""What one check found, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Mark(enum.Enum):
    """How a check ended. FAILED: a peer would not work here; WARNING: it would, not as well as it could."""

    OK = "✓"
    WARNING = "!"
    FAILED = "✗"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        check: its name, one or two words.
        mark: how it ended.
        text: what was found.
        remedy: what to do, a command where there is one; "" where all is well.
    """

    check: str
    mark: Mark
    text: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"check": self.check, "result": self.mark.name.lower(), "found": self.text, "remedy": self.remedy}


def works(findings: Sequence[Finding]) -> bool:
    """Whether a peer would work."""
    return all(finding.mark is not Mark.FAILED for finding in findings)

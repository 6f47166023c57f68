"""Output of a reproduction: a table of claims with our figures, for the terminal and as Markdown, and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2ptrain.simulation.plot import save_plot
from p2ptrain.simulation.records import as_text, format_table
from p2ptrain.simulation.reproduction.claims import MEASURES, Verdict
from p2ptrain.simulation.reproduction.experiments import Outcome


def format_outcome(outcome: Outcome) -> str:
    """The variants, then each claim with the paper's figure, ours and the verdict."""
    reproduction = outcome.reproduction
    variants = format_table(list(outcome.records[0].values()))
    note = f"\n{reproduction.note}" if reproduction.note else ""
    return f"{reproduction.title}{note}\n\n{variants}\n\n{as_text(claim_rows(outcome), numbers=False, width=120)}"


def claim_rows(outcome: Outcome) -> list[dict[str, str]]:
    """A row for each claim, by the titles of its columns."""
    return [
        {
            "row": verdict.claim.row,
            "the paper says": verdict.claim.text,
            "paper": verdict.claim.paper,
            "here": figure(verdict),
            "verdict": verdict.words,
        }
        for verdict in outcome.verdicts
    ]


def figure(verdict: Verdict) -> str:
    """Our figure, in the paper's form."""
    _, is_loss = MEASURES[verdict.claim.measure]
    spread = "" if verdict.spread is None else f" (± {verdict.spread:.2g} over seeds)"
    values = f"{verdict.left:.4g} against {verdict.right:.4g}"
    if math.isnan(verdict.relative):
        return values + spread
    kind = "perplexity " if is_loss else ""
    return f"{kind}{100 * verdict.relative:+.2f} % ({values}){spread}"


def write_outcome(outcome: Outcome, directory: Path) -> None:
    """Write the records of the first seed, the verdicts as JSON, and the plot."""
    target = directory / outcome.reproduction.name
    for records in outcome.records[0].values():
        records.write(target / records.experiment.directory)
    verdicts = [
        {
            "row": v.claim.row,
            "text": v.claim.text,
            "paper": v.claim.paper,
            "measure": v.claim.measure,
            "left": v.left,
            "right": v.right,
            "relative": v.relative,
            "spread": v.spread,
            "words": v.words,
        }
        for v in outcome.verdicts
    ]
    content = {"title": outcome.reproduction.title, "seeds": outcome.seeds, "claims": verdicts}
    (target / "verdicts.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_plot(outcome.reproduction.title, list(outcome.records[0].values()), target / "curves.png")


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of these rows, with their keys as titles."""
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

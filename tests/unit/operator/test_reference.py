"""Reasons and metrics are stable and documented: what the code can say stands in docs/reference/states.md."""

from __future__ import annotations

import re
from pathlib import Path

import sft_operator
from sft_api.generate import ROOT
from sft_api.progress import Phase

PAGE = (ROOT / "docs" / "reference" / "states.md").read_text()
SOURCES = [path.read_text() for path in Path(sft_operator.__file__).parent.rglob("*.py")]


def found(pattern: str) -> set[str]:
    return {match for source in SOURCES for match in re.findall(pattern, source)}


def test_every_reason_is_documented() -> None:
    reasons = (
        found(r'Situation\(\s*(?:"\w+"|before), "(\w+)"')
        | found(r'Problem\(\s*"(\w+)"')
        | found(r'Wrong\("(\w+)"')
        | found(r'(?:INVALID_SPEC|UNHEARD) = "(\w+)"')
    )
    reasons |= {phase.value for phase in Phase} - {"Complete", "Failed"}

    assert {"PodsMissing", "ImagePull", "InvalidSpec", "PlaceNotAllowed"} <= reasons
    assert not [reason for reason in sorted(reasons) if not re.search(rf"\b{reason}\b", PAGE)]


def test_every_metric_is_documented() -> None:
    metrics = found(r'"(sft_(?:job|operator)_\w+)"')

    assert "sft_job_step" in metrics
    assert not [name for name in sorted(metrics) if name not in PAGE]

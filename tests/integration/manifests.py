"""Manifests for tests, and what is wrong with them.

Every part of the spec is YAML text, because how numbers, words and duplicate keys are read is part of what is tested.
"""

from dataclasses import dataclass, field

MINIMAL_SPEC = {
    "model": "{uri: hf://Qwen/Qwen3-0.6B}",
    "data": "{train: [{uri: hf://allenai/tulu-3-sft-mixture}]}",
    "compute": "{}",
}


def manifest(spec: dict[str, str | None] | None = None, *, name: str = "job", metadata: str = "") -> str:
    """A manifest with the minimal spec, parts of it replaced, added, or (with None) left out."""
    parts = {**MINIMAL_SPEC, **(spec or {})}
    lines = [f"  {part}: {text}" for part, text in parts.items() if text is not None]
    header = ["apiVersion: sftjob.dev/v1alpha1", "kind: SFTJob", f"metadata: {{name: {name}{metadata}}}", "spec:"]
    return "\n".join([*header, *lines]) + "\n"


def train(*sources: str) -> str:
    """``spec.data`` text with these sources besides a first good one."""
    return ", ".join(["{train: [{uri: hf://org/rows}", *sources]) + "]}"


@dataclass(frozen=True)
class Bad:
    """One fault.

    ``at``: the path both name. ``sentence``: what both say, when the fault is against a rule; ``hint``: what both say
    besides, about a near miss.
    """

    title: str
    at: str
    spec: dict[str, str | None] = field(default_factory=dict)
    sentence: str = ""
    hint: str = ""
    name: str = "job"
    metadata: str = ""

    @property
    def text(self) -> str:
        return manifest(self.spec, name=self.name, metadata=self.metadata)


ROWS = "train: [{uri: hf://org/rows}]"
"""The text of a ``spec.data`` that is good, to be gone on with."""

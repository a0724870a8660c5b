"""Who may know what: how parameters are sharded, and how processes speak, each have their place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import sft_trainer

ROOT = Path(*sft_trainer.__path__)
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of all that is imported, also within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def who_imports(*modules: str) -> set[str]:
    within = tuple(f"{module}." for module in modules)
    return {name for name, tree in FILES.items() if any(f"{each}.".startswith(within) for each in imported(tree))}


def test_only_strategies_know_how_parameters_are_sharded() -> None:
    knowing = who_imports("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._tensor")
    assert knowing == {"strategies/fsdp/boxes.py", "strategies/fsdp/sharding.py"}


def test_only_few_speak_to_other_processes() -> None:
    speaking = {name for name in who_imports("torch.distributed") if not name.startswith("strategies/")}
    assert speaking == {"alike.py", "checkpoint/group.py", "distributed.py", "topology.py"}

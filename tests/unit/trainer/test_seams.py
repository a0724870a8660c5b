"""Who may know what: how parameters are sharded, and how processes speak, each have their place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import sft_trainer

ROOT = Path(*sft_trainer.__path__)
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}

_SHARDED = {f"strategies/fsdp/{name}.py" for name in ("boxes", "sharding", "whole_matrices")}
"""Who knows how parameters are sharded."""


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
    assert knowing == _SHARDED


def test_only_few_speak_to_other_processes() -> None:
    speaking = {name for name in who_imports("torch.distributed") if not name.startswith("strategies/")}
    # versions.py gives a group its time-out, by a name that differs between versions of torch.
    assert speaking == {"checkpoint/group.py", "distributed.py", "topology.py", "versions.py"}


_OF_SHARDED_TENSORS = {"full_tensor", "to_local", "redistribute", "device_mesh", "placements", "from_local"}


def test_nobody_else_asks_a_tensor_for_its_part() -> None:
    asking = {
        name
        for name, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _OF_SHARDED_TENSORS
    }
    assert asking == _SHARDED


def test_ranks_are_numbers_in_names_and_words_only() -> None:
    # Whatever reads a rank might decide by it: those that do are few, and each is looked at.
    reading: dict[str, set[str]] = {}
    for name, tree in FILES.items():
        for node in ast.walk(tree):
            # That of a matrix is no process.
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("rank", "local_rank")
                and ast.unparse(node) != "lora.rank"
            ):
                reading.setdefault(name, set()).add(ast.unparse(node))
    # A supervisor knows ranks as processes that it starts.
    found = {name: texts for name, texts in reading.items() if not name.startswith(("supervisor/", "topology.py"))}
    assert found == {
        "__main__.py": {"ranks.rank"},  # the name of the file with what went wrong
        "checkpoint/group.py": {"self.topology.rank"},  # whose error it is
        "checkpoint/writing.py": {"group.topology.rank"},  # the name of a file
        "distributed.py": {"ranks.rank", "ranks.local_rank"},  # forms the group, before there is a topology
        "dummy_run.py": {"self.topology.rank"},  # its place among the figures of all
        "listeners.py": {"topology.rank"},  # the name of the file with what it holds of its GPU
        "strategies/megatron/buckets.py": {"group.rank"},  # which rows are its own
        "trainer.py": {"ranks.rank"},  # the name of the file with what it does
    }

"""Names that libraries keep to themselves change without a word: one file may use them."""

import ast
from collections.abc import Iterator

import pytest

from tests.unit.trainer.test_seams import FILES, imported


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of others that ``tree`` uses: what it gives to itself is its own."""
    own = {"_exit"}  # of os, and documented
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (
                value for each in node.args if isinstance(each, ast.Constant) and is_private(value := str(each.value))
            )
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("torch._", "transformers._")):
            yield str(node.value)
    yield from (name for name in imported(tree) if is_private(name) and not name.startswith("sft_"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("model._init_weights(part)", ["model._init_weights"]),
        ("from torch.distributed.tensor._utils import shape", ["torch.distributed.tensor._utils.shape"]),
        ("def f():\n    from transformers.utils import _compile", ["transformers.utils._compile"]),
        ("getattr(model, '_is_stateful', False)", ["_is_stateful"]),
        ("torch._fused_adamw_(x)", ["torch._fused_adamw_"]),
        ("SLOW = ('torch._dynamo',)", ["torch._dynamo"]),
        ("class A:\n    def f(self, other):\n        return self._x - other._x + self.__dict__", []),
    ],
)
def test_private_names_of_others_are_found(source: str, found: list[str]) -> None:
    assert list(private_names(ast.parse(source))) == found


def test_private_names_of_libraries_are_used_in_one_file() -> None:
    used = {name: found for name, tree in FILES.items() if (found := list(private_names(tree)))}
    assert set(used) == {"versions.py"}, used

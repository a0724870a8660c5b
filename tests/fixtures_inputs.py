"""Real data and a real, very small model for tests, made by examples/make_inputs.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "make_inputs.py"


def _load_script() -> ModuleType:
    """The script as a module: examples/ is not a package."""
    spec = importlib.util.spec_from_file_location("make_inputs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module


make_inputs_script = _load_script()
make_inputs = make_inputs_script.make_inputs


@pytest.fixture(scope="session")
def tiny_inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An `Inputs`: paths `model`, `train`, `eval`, `alpaca`. Shared by the session: read, never change."""
    return make_inputs(tmp_path_factory.mktemp("tiny_inputs"), size="tiny")

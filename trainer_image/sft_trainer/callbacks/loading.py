"""From ``training.callbacks`` to objects: which classes they are, and whether they take their arguments."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sft_api.v1alpha1 import CallbackSpec
from sft_trainer.errors import CallbackError, ConfigError
from sft_trainer.versions import show_flash_attention

from .base import Callback

_ON_THE_PATH = (
    "the modules of callbacks must lie where the trainer's Python finds them: installed in compute.image or in a "
    "folder of its PYTHONPATH, and with sft run in this Python or a folder of PYTHONPATH"
)
_NEVER_RUNS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""A call of such a function does nothing of what it says."""
Maker = Callable[[], Callback]


def find(specs: Sequence[CallbackSpec]) -> list[tuple[str, Maker]]:
    """Of each of ``specs`` its words, and what makes its object. Modules are imported, nothing is made.

    Raises ``ConfigError`` where there is no such class, it does not take the arguments, or a method not what it is
    told, and ``CallbackError`` where its module raises something else than that a module is missing.
    """
    if specs:
        show_flash_attention()  # they may import it, whichever it is
    return [(spec.import_path, _maker(f"training.callbacks[{index}]", spec)) for index, spec in enumerate(specs)]


def failed(what: str, error: BaseException) -> CallbackError:
    """The error of a run that ``what`` of a callback ended by raising ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:500]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return CallbackError(f"{what} raised {said}{place}: mend it, or take it out of training.callbacks")


def _maker(field: str, spec: CallbackSpec) -> Maker:
    kind = _class(field, spec.import_path)
    arguments = _arguments(f"{field}.arguments", spec.import_path, kind, spec.arguments)

    def make() -> Callback:
        try:
            return kind(**arguments)
        except BaseException as error:
            raise failed(f"{spec.import_path}.__init__", error) from error

    return make


def _class(field: str, path: str) -> type[Callback]:
    module_name, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{field}.class: there is no module {error.name!r} ({path}): {_ON_THE_PATH}") from error
        raise ConfigError(
            f"{field}.class: {module_name} cannot be imported: {error}; install it beside {path} in compute.image"
        ) from error
    except BaseException as error:
        raise failed(f"the import of {module_name}", error) from error
    for name in names.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{field}.class: {module_name} has no {names!r}")
        found = getattr(found, name)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(f"{field}.class: {path} is no class that inherits from sft_trainer.callbacks.Callback")
    _check_methods(f"{field}.class", path, found)
    return found


def _check_methods(field: str, path: str, kind: type[Callback]) -> None:
    """Refuse a method that cannot be called as it will be, perhaps hours later: at the first save, or the end."""
    for name, method in vars(Callback).items():
        theirs = inspect.getattr_static(kind, name)
        if not (name.startswith("on_") and isinstance(theirs, FunctionType)):
            continue
        given = list(inspect.signature(method).parameters)
        if any(kind_of(theirs) for kind_of in _NEVER_RUNS):
            raise ConfigError(
                f"{field}: {path}.{name} is called, and not awaited or gone through: what it says would never be done; "
                f"write def {name}({', '.join(given)}), without async or yield"
            )
        try:
            inspect.signature(theirs, follow_wrapped=False).bind(*given)
        except TypeError as error:
            raise ConfigError(
                f"{field}: {path}.{name} cannot be called as it is ({error}): write def {name}({', '.join(given)})"
            ) from error


def _arguments(field: str, path: str, kind: type, given: Mapping[str, str]) -> dict[str, Any]:
    """``given`` as the types that ``kind.__init__`` names, strings where it names none."""
    try:
        signature = inspect.signature(kind, eval_str=True)
    except Exception as error:
        raise failed(f"the signature of {path}", error) from error
    parameters = signature.parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    values: dict[str, Any] = {}
    for name, text in given.items():
        parameter = parameters.get(name)
        if parameter is None and not takes_any:
            known = ", ".join(parameters) or "none"
            raise ConfigError(f"{field}.{name}: {path} has no such argument; it takes: {known}")
        values[name] = _typed(f"{field}.{name}", parameter, text)
    try:
        signature.bind(**values)
    except TypeError as error:
        raise ConfigError(f"{field}: {path} cannot be made with these: {error}") from error
    return values


def _typed(field: str, parameter: inspect.Parameter | None, text: str) -> Any:
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return text
    try:
        return TypeAdapter(parameter.annotation).validate_strings(text)
    except ValidationError as error:
        raise ConfigError(f"{field}: {text!r} does not fit: {error.errors()[0]['msg']}") from error
    except Exception:
        # A type of the user's that pydantic knows nothing of: it gets what was written.
        return text

"""Which layers of a model get adapters, and which modules are trained: by name, as peft reads ``target_modules``,
``target_parameters``, ``exclude_modules`` and ``modules_to_save``."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

ALL_LINEAR = "all-linear"
"""In place of names: every linear layer of the model but its head."""
EXPERTS = r"(^|\.)experts(\.[A-Za-z0-9_]+)?$"
"""What is found in a name that means experts: those of a layer, or one of the two tensors in which they are stacked."""
_MEANS_EXPERTS = re.compile(EXPERTS)

_REFUSED_BY_PEFT = {"falcon_h1": "out_proj", "nemotron_h": "out_proj"}
"""By type of model, what of its layers peft loads no adapters of: kernels of Mamba read these weights by themselves."""

OF_EXPERTS = "routers get no adapters, and experts where lora.targetModules names them: experts, or experts.down_proj"
"""Of a mixture of experts."""


class AdapterError(ValueError):
    """Names that fit no layer, or too many; the text says which there are."""


def refused_by_peft(kind: str, module: str) -> bool:
    """Whether peft would load no adapter of the linear layer ``module`` of a model of type ``kind``: it gets none."""
    return module.rpartition(".")[2] == _REFUSED_BY_PEFT.get(kind)


def named(module: str, names: Iterable[str]) -> bool:
    """Whether one of ``names`` is the name ``module``, or ends it after a dot."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def means_experts(name: str) -> bool:
    """Whether ``name`` can mean experts: no other does, so that ``down_proj`` is that of layers beside them."""
    return _MEANS_EXPERTS.search(name) is not None


def named_experts(stacked: str, names: Iterable[str]) -> bool:
    """Whether one of ``names`` means the experts that are ``stacked`` in the tensor of that name."""
    module = stacked.rpartition(".")[0]
    return any(means_experts(name) and (named(stacked, [name]) or named(module, [name])) for name in names)


def within(parameter: str, names: Collection[str]) -> bool:
    """Whether ``parameter`` lies in a module that one of ``names`` means, at whatever depth."""
    return not meanings(parameter).isdisjoint(names)


def meanings(parameter: str) -> set[str]:
    """All names that mean a module in which ``parameter`` lies: whole ones, and their ends."""
    parts = parameter.split(".")[:-1]
    return {".".join(parts[begin:end]) for end in range(1, len(parts) + 1) for begin in range(end)}


def adapted(
    linear: Collection[str],
    head: str | None,
    targets: Collection[str],
    excluded: Collection[str],
    trained: Collection[str] = (),
    stacked: Sequence[str] = (),
) -> list[str]:
    """The linear layers that get adapters, of all that a model has (``linear``, full names, in order), and behind them
    the tensors of experts that do, of those that are ``stacked`` (full names, in order).

    None does that lies in a module which ``trained`` means: all of it is trained. ``head`` is the name of its output
    layer, which ``all-linear`` leaves out, as it does experts. Raises ``AdapterError`` for a name in ``targets`` or
    ``excluded`` that means neither, for the head in ``targets``, and when nothing is left.
    """
    everything = ALL_LINEAR in targets
    names = [name for name in targets if name != ALL_LINEAR]
    wanted = [name for name in linear if name != head] if everything else [m for m in linear if named(m, names)]
    experts = [name for name in stacked if named_experts(name, names)]
    for field, given in (("targetModules", names), ("excludeModules", excluded)):
        for name in given:
            if any(named(module, [name]) for module in linear) or any(named_experts(each, [name]) for each in stacked):
                continue
            there = f"its linear layers are {', '.join(ends(layer for layer in linear if layer != head))}"
            lacking = "no linear layer of the model is called so"
            if means_experts(name):
                lacking = "no experts of the model are called so" if stacked else "the model has no experts"
                there = f"they are {stacked[0]} to {stacked[-1]}" if stacked else there
            raise AdapterError(f"lora.{field} names {name!r}, and {lacking}: {there}")
    found = [module for module in wanted if not named(module, excluded) and not within(f"{module}.weight", trained)]
    found += [name for name in experts if not named_experts(name, excluded) and not within(name, trained)]
    if not found:
        left = ", ".join(ends([*wanted, *experts]))
        if trained and not excluded:
            raise AdapterError(
                f"training.trainableModules leaves no layer to adapt: all of {left} lies in what it names, and is "
                "trained whole; take a name out of it, or leave lora out"
            )
        fields = "lora.excludeModules and training.trainableModules leave" if trained else "lora.excludeModules leaves"
        raise AdapterError(f"{fields} nothing to train of {left}: take a name out of it")
    if head in found:
        raise AdapterError(
            f"lora.targetModules names {head}, the head of the model, which gets no adapter: its loss is computed from "
            "its weight alone; take it out"
        )
    return found


def hint_on_peft(error: AdapterError, kind: str) -> AdapterError:
    """What is wrong with names for a model of type ``kind``, which may have a layer called so that gets no adapter."""
    leaf = _REFUSED_BY_PEFT.get(kind)
    return AdapterError(f"{error}; {leaf} gets none, as peft would not load it") if leaf else error


def hint_on_experts(error: AdapterError) -> str:
    """What is wrong with names for a mixture of experts, which has few of the layers that people mean."""
    return f"{error}; {OF_EXPERTS}"


def ends(modules: Iterable[str], parts: int = 1) -> list[str]:
    """The last ``parts`` of names, each once: q_proj, k_proj, …"""
    return list(dict.fromkeys(".".join(module.split(".")[-parts:]) for module in modules))


def shortest(modules: Collection[str], linear: Collection[str], parts: int = 1) -> list[str]:
    """The fewest names that mean exactly ``modules`` of all that are ``linear``: their ends, of so many ``parts``,
    where these say it."""
    short = ends(modules, parts)
    return short if {name for name in linear if named(name, short)} == {*modules} else sorted(modules)


def no_such_module(name: str, parameters: Iterable[str]) -> str:
    """What is wrong with ``name`` in training.trainableModules, of a model that has such ``parameters``."""
    there = (re.sub(r"\.\d+\.", ".N.", parameter).rpartition(".")[0] for parameter in parameters)
    return (
        f"training.trainableModules names {name!r}, and no module of the model with weights is called so: there are "
        f"{', '.join(dict.fromkeys(there))}"
    )


def adapter_parameters(
    shapes: Mapping[str, tuple[int, ...]], rank: int, rank_of_experts: int, *, dora: bool = False
) -> int:
    """Parameters of the adapters of linear layers with these weights, (outputs, inputs), and of experts with these,
    (experts, outputs, inputs): A and B of each, and by ``dora`` a magnitude for each output."""
    return sum(
        math.prod(experts) * (rank_of_experts if experts else rank) * (outputs + inputs) + outputs * dora
        for *experts, outputs, inputs in shapes.values()
    )

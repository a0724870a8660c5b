"""Which layers of a model get adapters, and which modules are trained: by name, as peft reads ``target_modules``,
``exclude_modules`` and ``modules_to_save``."""

from collections.abc import Collection, Iterable, Mapping

ALL_LINEAR = "all-linear"
"""In place of names: every linear layer of the model but its head."""

OF_EXPERTS = "its experts are stacked in one tensor and its routers are no linear layers: neither gets adapters"
"""Of a mixture of experts."""


class AdapterError(ValueError):
    """Names that fit no layer, or too many; the text says which there are."""


def named(module: str, names: Iterable[str]) -> bool:
    """Whether one of ``names`` is the name ``module``, or ends it after a dot."""
    return any(module == name or module.endswith(f".{name}") for name in names)


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
) -> list[str]:
    """The linear layers that get adapters, of all that a model has (``linear``, full names, in order).

    None does that lies in a module which ``trained`` means: all of it is trained. ``head`` is the name of its output
    layer, which ``all-linear`` leaves out. Raises ``AdapterError`` for a name in ``targets`` or ``excluded`` that no
    linear layer has, for the head in ``targets``, and when nothing is left.
    """
    everything = ALL_LINEAR in targets
    wanted = [name for name in linear if name != head] if everything else [m for m in linear if named(m, targets)]
    for field, names in (("targetModules", () if everything else targets), ("excludeModules", excluded)):
        for name in names:
            if not any(named(module, [name]) for module in linear):
                raise AdapterError(
                    f"lora.{field} names {name!r}, and no linear layer of the model is called so: its linear layers "
                    f"are {', '.join(ends(linear))}"
                )
    found = [module for module in wanted if not named(module, excluded) and not within(f"{module}.weight", trained)]
    if not found:
        fields = "lora.excludeModules and training.trainableModules leave" if trained else "lora.excludeModules leaves"
        raise AdapterError(f"{fields} nothing to train of {', '.join(ends(wanted))}: take a name out of it")
    if head in found:
        raise AdapterError(
            f"lora.targetModules names {head}, the head of the model, which gets no adapter: its loss is computed from "
            "its weight alone; take it out"
        )
    return found


def of_experts(error: AdapterError) -> str:
    """What is wrong with names for a mixture of experts, which has few of the layers that people mean."""
    return f"{error}; {OF_EXPERTS}; write all-linear, or some of the names that there are"


def ends(modules: Iterable[str]) -> list[str]:
    """The last parts of names, each once: q_proj, k_proj, …"""
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def shortest(modules: Collection[str], linear: Collection[str]) -> list[str]:
    """The fewest names that mean exactly ``modules`` of all that are ``linear``: their ends where these say it."""
    short = ends(modules)
    return short if {name for name in linear if named(name, short)} == {*modules} else sorted(modules)


def adapter_parameters(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    """Parameters of the adapters of linear layers with these weights, (outputs, inputs): A and B of each."""
    return sum(rank * (outputs + inputs) for outputs, inputs in shapes.values())

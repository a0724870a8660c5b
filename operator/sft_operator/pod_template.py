"""What the platform adds to training pods: a partial pod template, checked when it is read, and merged beneath ours.

Merged as Kubernetes merges a strategic patch: maps by their keys, lists that have one by their merge key, all else as a
whole. What is ours in a pod no template changes: who has one that would is told why before anything is made.
"""

from collections.abc import Iterable, Mapping
from posixpath import normpath
from typing import Any

from pydantic import ValidationError

from sft_api.v1alpha1 import GROUP, ComputeSpec, ResourcesSpec
from sft_api.v1alpha1.compute import EnvVar
from sft_api.v1alpha1.uris import CLAIMS_FOLDER

from .names import CLAIM_VOLUME, MOUNTS, TRAINER_CONTAINER, child_labels

Template = Mapping[str, Any]

_Keys = Mapping[str, tuple[str, ...]]
_IN_CONTAINER: _Keys = {"env": ("name",), "volumeDevices": ("devicePath",), "volumeMounts": ("mountPath",)}
_IN_POD: _Keys = {
    "containers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumes": ("name",),
}
_MERGE_KEYS: _Keys = {**_IN_POD, **_IN_CONTAINER}
"""Lists of a pod whose items are told apart by these of their fields."""
_MERGED_WITHIN = ("containers", "initContainers")
"""Of these lists items with one key are merged. Elsewhere the upper one replaces the other: a volume has one source, a
variable one value."""

_FOR_THE_RUN = "the spec of a job says it: runPolicy."
_BY_HOST_NAMES = "pods of a group find one another by the names that they have"
OURS_IN_POD: Mapping[str, str] = {
    "activeDeadlineSeconds": f"{_FOR_THE_RUN}activeDeadlineSeconds limits a run",
    "automountServiceAccountToken": "training pods get no token of the Kubernetes API",
    "enableServiceLinks": "variables of all Services of a namespace are kept from the trainer",
    "hostname": _BY_HOST_NAMES,
    "hostnameOverride": _BY_HOST_NAMES,
    "nodeName": "the scheduler places pods: give nodeSelector or affinity",
    "restartPolicy": "the Job replaces pods that end, and restarts none",
    "schedulingGroup": "each job has a group of its own, where the scheduler knows groups",
    "setHostnameAsFQDN": _BY_HOST_NAMES,
    "subdomain": _BY_HOST_NAMES,
    "terminationGracePeriodSeconds": f"{_FOR_THE_RUN}terminationGracePeriodSeconds is the time to save in",
}
"""Fields of a pod's spec that no template has, and why."""
_AS_USER = "the trainer runs as user 1000 under the restricted standard; a container beside it may have its own"
_OURS_IN_SECURITY_CONTEXT = (
    "fsGroup",
    "fsGroupChangePolicy",
    "runAsGroup",
    "runAsNonRoot",
    "runAsUser",
    "seccompProfile",
)
_OF_TRAINER = ("env", "name", "resources", "securityContext", "volumeDevices", "volumeMounts")
"""Fields that a template may have of the trainer's own container; the others say what the trainer is."""
_OF_TRAINER_SECURITY = ("appArmorProfile", "capabilities", "seLinuxOptions")
_GPUS = str(ComputeSpec.model_fields["gpu_resource_name"].default)
_OUR_LABEL_DOMAINS = (f"{GROUP}/", "batch.kubernetes.io/")
_OUR_LABELS = frozenset({*child_labels(""), "controller-uid", "job-name"})


def merged(beneath: Any, upper: Any, name: str = "") -> Any:
    """``upper`` over ``beneath``, values of the field ``name``; neither is changed.

    Items of lists that have a merge key stand in the order of ``beneath``, what is new after them.
    """
    if isinstance(beneath, Mapping) and isinstance(upper, Mapping):
        both = {field: merged(beneath[field], upper[field], field) for field in upper if field in beneath}
        return {**beneath, **upper, **both}
    if _is_keyed(name, beneath) and _is_keyed(name, upper):
        items = {_key(name, item): item for item in beneath}
        for item in upper:
            key = _key(name, item)
            items[key] = merged(items[key], item) if name in _MERGED_WITHIN and key in items else item
        return list(items.values())
    return upper


def trainer_of(spec: Template) -> Template:
    """What the ``spec`` of a template says of the trainer's own container; empty when it says nothing."""
    return next((item for item in spec.get("containers", ()) if item["name"] == TRAINER_CONTAINER), {})


def checked_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """``labels``, or annotations, of a template; raises ``ValueError`` for one that is ours."""
    for name in labels:
        if name in _OUR_LABELS or name.startswith(_OUR_LABEL_DOMAINS):
            raise ValueError(f"{name}: pods, or what they are to one another, are known by it: leave it out")
    return labels


def checked_spec(spec: Template) -> Template:
    """``spec`` of a template, if the pods of a job can be made with it as far as we merge it; what else is wrong with
    it the API server says.

    Raises ``ValueError`` with the path of what is wrong, and why.
    """
    _check_lists(spec, _IN_POD, "")
    for kind in _MERGED_WITHIN:
        for container in spec.get(kind, ()):
            _check_lists(container, _IN_CONTAINER, f"{kind}[{container['name']}].")
    for name, why in OURS_IN_POD.items():
        if name in spec:
            raise ValueError(f"{name}: {why}")
    _check_fields(_object(spec, "securityContext", ""), _OURS_IN_SECURITY_CONTEXT, "securityContext", _AS_USER)
    selector = _object(spec, "nodeSelector", "")
    if not all(isinstance(value, str) for value in selector.values()):
        raise ValueError("nodeSelector: values must be strings: put them in quotes")
    if not all(_is_toleration(item) for item in _list(spec, "tolerations", "")):
        raise ValueError("tolerations: each item must be an object with strings")
    for volume in spec.get("volumes", ()):
        name = volume["name"]
        if name in MOUNTS or CLAIM_VOLUME.fullmatch(name):
            raise ValueError(f"volumes[{name}]: a volume of the trainer's has this name: choose another one")
    if any(item["name"] == TRAINER_CONTAINER for item in spec.get("initContainers", ())):
        raise ValueError(f"initContainers[{TRAINER_CONTAINER}]: the trainer has this name: choose another one")
    trainer = trainer_of(spec)
    if trainer:
        _check_trainer(trainer, f"containers[{TRAINER_CONTAINER}]")
    return spec


def _check_trainer(container: Template, path: str) -> None:
    for name in container:
        if name not in _OF_TRAINER:
            raise ValueError(f"{path}.{name}: {_instead(name)}")
    for variable in container.get("env", ()):
        name, value = variable["name"], variable.get("value", "")
        if not isinstance(value, str):
            raise ValueError(f"{path}.env[{name}].value: it is {value!r} and must be a string: put it in quotes")
        try:
            EnvVar(name=name, value="")
        except ValidationError as error:
            raise ValueError(f"{path}.env[{name}]: {error.errors()[0]['msg']}") from error
    for mount in container.get("volumeMounts", ()):
        # As the kubelet reads it, however it is written.
        folder = normpath(f"/{mount['mountPath'].strip('/')}")
        if folder in MOUNTS.values() or f"{folder}/".startswith(f"{CLAIMS_FOLDER}/"):
            raise ValueError(f"{path}.volumeMounts[{folder}]: the trainer has a volume of its own there")
    security = _object(container, "securityContext", path)
    for name in security:
        if name not in _OF_TRAINER_SECURITY:
            raise ValueError(f"{path}.securityContext.{name}: {_AS_USER}")
    capabilities = _object(security, "capabilities", f"{path}.securityContext")
    _check_fields(capabilities, ("drop",), f"{path}.securityContext.capabilities", "all are dropped; add is possible")
    trainer_resources(container, path)


def trainer_resources(container: Template, path: str = "") -> ResourcesSpec:
    """What ``container`` says of the trainer's resources; raises ``ValueError`` where a job could not say it."""
    given = {name: value for name, value in _object(container, "resources", path).items() if name != "claims"}
    try:
        resources = ResourcesSpec.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((f"{path}.resources", *(str(part) for part in first["loc"])))
        raise ValueError(f"{where}: {first['msg']}") from error
    if _GPUS in (*resources.requests, *resources.limits):
        raise ValueError(f"{path}.resources: {_GPUS} is asked for by compute.gpusPerNode of a job: leave it out")
    return resources


def _instead(name: str) -> str:
    if name in ("image", "imagePullPolicy"):
        return f"give {name} beside the template, not in it"
    return f"it is the trainer's own; of its container a template may have {', '.join(_OF_TRAINER)}"


def _check_fields(given: Template, ours: Iterable[str], path: str, why: str) -> None:
    for name in ours:
        if name in given:
            raise ValueError(f"{path}.{name}: {why}")


def _check_lists(parent: Template, keys: _Keys, path: str) -> None:
    """Lists that are merged by a key hold objects that have it, once each."""
    for name, fields in keys.items():
        if name not in parent:
            continue
        if not _is_keyed(name, parent[name]):
            raise ValueError(f"{path}{name}: it must be a list of objects, each with {' and '.join(fields)}")
        found = [_key(name, item) for item in parent[name]]
        if twice := next((key for key in found if found.count(key) > 1), None):
            raise ValueError(f"{path}{name}: {'/'.join(twice)} stands there more than once")


def _is_toleration(item: Any) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(name, ""), str) for name in ("key", "effect"))


def _is_keyed(name: str, value: Any) -> bool:
    keys = _MERGE_KEYS.get(name)
    return (
        keys is not None
        and isinstance(value, list)
        and all(isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in keys) for item in value)
    )


def _key(name: str, item: Template) -> tuple[str, ...]:
    return tuple(item[key] for key in _MERGE_KEYS[name])


def _object(parent: Template, name: str, path: str) -> Template:
    found = parent.get(name, {})
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}.{name}: it must be an object, and is {found!r}".lstrip("."))
    return found


def _list(parent: Template, name: str, path: str) -> list[Any]:
    found = parent.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"{path}.{name}: it must be a list, and is {found!r}".lstrip("."))
    return found

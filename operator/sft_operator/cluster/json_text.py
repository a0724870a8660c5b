"""JSON of the API server, by msgspec where it can. Pure.

What msgspec refuses (numbers beyond a float, lone surrogates) goes the way of the standard library.
"""

import json
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from sft_api.v1alpha1 import KIND
from sft_api.v1alpha1.job import RETRY_ANNOTATION

Spec = TypeVar("Spec")
Status = TypeVar("Status")


class _Metadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any
    labels: Any
    annotations: Any
    finalizers: Any
    ownerReferences: Any


# Others may be large: kubectl keeps all that was applied in one.
_OurAnnotations = TypedDict("_OurAnnotations", {RETRY_ANNOTATION: Any}, total=False)  # type: ignore[misc]


class _OurMetadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    generation: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    labels: Any
    annotations: _OurAnnotations
    finalizers: Any


class _OurObject(TypedDict, total=False):
    apiVersion: Any
    kind: Any
    metadata: _OurMetadata
    spec: Any
    status: Any


class _OurEvent(TypedDict, total=False):
    type: Any
    object: _OurObject


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    priority: Any
    priorityClassName: Any


class _PodStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    podIP: Any
    conditions: Any
    containerStatuses: Any
    initContainerStatuses: Any


class _TemplateSpec(TypedDict, total=False):
    priorityClassName: Any
    schedulingGroup: Any


class _Template(TypedDict, total=False):
    spec: _TemplateSpec


class _JobSpec(TypedDict, total=False):
    completions: Any
    parallelism: Any
    suspend: Any
    activeDeadlineSeconds: Any
    template: _Template


class _JobStatus(TypedDict, total=False):
    startTime: Any
    completionTime: Any
    active: Any
    succeeded: Any
    completedIndexes: Any
    conditions: Any


class _Object(TypedDict, Generic[Spec, Status], total=False):
    metadata: _Metadata
    spec: Spec
    status: Status


class _Event(TypedDict, Generic[Spec, Status], total=False):
    type: Any
    object: _Object[Spec, Status]


_EVENTS: dict[str, msgspec.json.Decoder[Any]] = {
    KIND: msgspec.json.Decoder(_OurEvent),
    "Pod": msgspec.json.Decoder(_Event[_PodSpec, _PodStatus]),
    "Job": msgspec.json.Decoder(_Event[_JobSpec, _JobStatus]),
}
"""Of these only what ``picture.observed`` reads becomes an object: containers and managed fields are most of a line."""
_OBJECTS: dict[str, msgspec.json.Decoder[Any]] = {
    KIND: msgspec.json.Decoder(_OurObject),
    "Job": msgspec.json.Decoder(_Object[_JobSpec, _JobStatus]),
}
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def read(text: bytes) -> Any:
    """The document in ``text``; raises ``ValueError``, ``RecursionError``."""
    try:
        return _ANY.decode(text)
    except ValueError:
        return json.loads(text.decode(errors="replace"))


def read_object(kind: str, text: bytes) -> Any:
    """An object of ``kind``, at least what is read of it; raises as ``read`` does."""
    try:
        return _OBJECTS[kind].decode(text)
    except (KeyError, ValueError):
        return read(text)


def read_event(kind: str, line: bytes) -> Any:
    """The event of a watch of ``kind``, of its object at least what is read of it; raises as ``read`` does."""
    try:
        event = _EVENTS[kind].decode(line)
    except (KeyError, ValueError):
        return read(line)
    # Errors and bookmarks hold something else.
    return event if event.get("type") in ("ADDED", "MODIFIED", "DELETED") else read(line)


def written(document: Any) -> bytes:
    """``document`` as it is sent."""
    try:
        return msgspec.json.encode(document)
    except (TypeError, ValueError):
        return json.dumps(document, separators=(",", ":")).encode()

"""The pod template: one supervisor, under the restricted pod security standard, without a token for the API."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from sft_api.place import TAKE_OVER_VARIABLE
from sft_api.progress import PROGRESS_PORT
from sft_api.spec_uris import uris_of
from sft_api.trainer_config import BEGUN_FILE, CONFIG_PATH
from sft_api.v1alpha1 import ComputeSpec, S3Spec, SFTJob
from sft_api.v1alpha1.megatron import megatron_of
from sft_api.v1alpha1.uris import CLAIMS_FOLDER

from ..config import PodSettings, StoreSettings
from ..names import (
    CACHE_FOLDER,
    CONFIG_KEY,
    MOUNTS,
    RUN_FOLDER,
    TRAINER_CONTAINER,
    begun_map_name,
    child_labels,
    config_map_name,
    coordinator_host,
)
from ..picture.observed import Manifest
from ..pod_template import merged
from .config_map import effective_s3
from .resources import pod_resources, shared_memory_bytes

USER_ID = 1000
LOST_NODE_SECONDS = 60
"""How long a pod stays bound to a node that is not ready or not reachable; Kubernetes' own default is 300."""

_HEALTH = {"path": "/healthz", "port": "progress"}


def build_pod_template(job: SFTJob, pods: PodSettings, store: StoreSettings | None, *, take_over: str = "") -> Manifest:
    """``spec.template`` of the Job; with the word, if there is one, by which its place is to be taken over.

    ``pods`` are the settings of this job's pods, with its profile. Raises ``ValueError`` like ``_image``.
    """
    compute = job.spec.compute
    image = _image(job, pods)
    claims = _claims(job)
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        "image": image,
        "command": list(pods.command),
        "env": [
            *_environment(job, effective_s3(job, store), pods),
            *([{"name": TAKE_OVER_VARIABLE, "value": take_over}] if take_over else []),
        ],
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "resources": pod_resources(compute, pods),
        # Until the supervisor first answers nothing else is asked: an image may start slowly from a busy disk.
        "startupProbe": {"httpGet": _HEALTH, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 300},
        # The operator replaces one that it is told does not answer for long (decisions/silence.py).
        "readinessProbe": {"httpGet": _HEALTH, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        # For when no operator does. It answers whatever its workers do: one that is silent for two minutes can neither
        # save nor restart them. Its end waits for the pod's grace period all the same: one of the probe's own counts
        # only where a container is started again (kubelet 1.35, killPodWithSyncResult).
        "livenessProbe": {"httpGet": _HEALTH, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 12},
        # Without words of the supervisor's own (no such module, no such user) the log says most.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            *(
                {"name": name, "mountPath": folder, **({"readOnly": True} if name == "config" else {})}
                for name, folder in MOUNTS.items()
            ),
            *(
                {"name": f"claim-{number}", "mountPath": f"{CLAIMS_FOLDER}/{claim}"}
                for number, claim in enumerate(claims)
            ),
        ],
    }
    pull_policy = compute.image_pull_policy or pods.image_pull_policy
    if pull_policy:
        container["imagePullPolicy"] = pull_policy
    spec: Manifest = {
        "restartPolicy": "Never",
        "subdomain": job.metadata.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": job.spec.run_policy.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {
                "name": "config",
                "projected": {
                    "sources": [
                        _file_of(config_map_name(job.metadata.name), CONFIG_KEY, CONFIG_PATH.rpartition("/")[2]),
                        # Not there before the run has begun.
                        _file_of(begun_map_name(job.metadata.name), BEGUN_FILE, BEGUN_FILE, optional=True),
                    ]
                },
            },
            {"name": "cache", "emptyDir": {"sizeLimit": compute.cache_size}},
            {"name": "run", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": str(shared_memory_bytes(compute, pods))},
            },
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, claim in enumerate(claims)
            ),
        ],
        **_scheduling(compute, pods),
    }
    metadata: Manifest = {"labels": {**compute.labels, **child_labels(job.metadata.name)}}
    if compute.annotations:
        metadata["annotations"] = dict(compute.annotations)
    whole: Manifest = merged(_platform_template(pods), {"metadata": metadata, "spec": spec})
    return whole


def _platform_template(pods: PodSettings) -> Manifest:
    """The platform's template without what ours has of it already, variables and quantities of the trainer's container,
    which comes first."""
    template = pods.template.model_dump(exclude_defaults=True)
    spec = template.get("spec", {})
    trainer = {
        **{name: value for name, value in pods.trainer.items() if name != "env"},
        "name": TRAINER_CONTAINER,
        "resources": {name: value for name, value in pods.trainer.get("resources", {}).items() if name == "claims"},
    }
    others = [item for item in spec.get("containers", []) if item["name"] != TRAINER_CONTAINER]
    return {**template, "spec": {**spec, "containers": [trainer, *others]}}


def _file_of(config_map: str, key: str, path: str, *, optional: bool = False) -> Manifest:
    return {"configMap": {"name": config_map, "items": [{"key": key, "path": path}], "optional": optional}}


def _image(job: SFTJob, pods: PodSettings) -> str:
    """The trainer image; raises ``ValueError`` when neither the spec nor the settings name one with what it takes."""
    given = job.spec.compute.image
    if megatron_of(job.spec) is not None:
        if image := given or pods.megatron_image:
            return image
        raise ValueError(
            "spec.strategy.megatron needs an image with Megatron-Core, and the operator has none: ask the "
            "administrator to set pods.megatronImage, name one in spec.compute.image, or choose spec.strategy.fsdp"
        )
    if image := given or pods.image:
        return image
    raise ValueError(
        "spec.compute.image is missing and the operator has no default image: give one, or ask the administrator "
        "to set pods.image"
    )


def _scheduling(compute: ComputeSpec, pods: PodSettings) -> Manifest:
    """Fields of the pod spec that pass through; what is absent is left out."""
    secrets = [*compute.image_pull_secrets, *pods.image_pull_secrets]
    fields: Manifest = {
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
        "serviceAccountName": compute.service_account_name,
        "nodeSelector": dict(compute.node_selector),
        "tolerations": _tolerations(compute, pods.pod_spec.get("tolerations", ())),
        "priorityClassName": compute.priority_class_name,
        "runtimeClassName": compute.runtime_class_name,
    }
    return {name: value for name, value in fields.items() if value}


def _tolerations(compute: ComputeSpec, platform: Iterable[Manifest]) -> list[Manifest]:
    """The spec's, the platform's, and a short patience with lost nodes: the whole group waits for their pods.

    What only lets pods be placed (``NoSchedule``) says nothing of that: Kubernetes would add a patience of 300 s.
    """
    given = [item.model_dump(by_alias=True, exclude_none=True) for item in compute.tolerations]
    given += [dict(item) for item in platform if item not in given]
    known = {item.get("key") or None for item in given if item.get("effect") in (None, "NoExecute")}
    return given + [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in known and None not in known
    ]


def _claims(job: SFTJob) -> list[str]:
    """Persistent volume claims that the spec's URIs name, in alphabetical order."""
    return sorted({urlsplit(uri).netloc for uri in uris_of(job.spec).values() if uri.startswith("pvc://")})


def _environment(job: SFTJob, s3: S3Spec, pods: PodSettings) -> list[Manifest]:
    """Environment of the container. What the platform gives, in ``pods`` and in its template, replaces our values, and
    what the user gives both; reserved names are refused before."""
    spec = job.spec
    variables: dict[str, Manifest] = {
        name: {"value": value}
        for name, value in (
            ("SFT_NODES", str(spec.compute.nodes)),
            ("SFT_COORDINATOR", coordinator_host(job.metadata.name)),
            ("SFT_CONFIG", CONFIG_PATH),
            ("SFT_RUN_DIR", RUN_FOLDER),
            ("USER", "sft"),  # torch asks for the name of the user, whom the image may not know
            ("HOME", "/tmp"),  # noqa: S108 -- in the container, an emptyDir of its own
            ("XDG_CACHE_HOME", CACHE_FOLDER),
            ("HF_HOME", f"{CACHE_FOLDER}/huggingface"),
            ("TORCHINDUCTOR_CACHE_DIR", f"{CACHE_FOLDER}/inductor"),
            ("TRITON_CACHE_DIR", f"{CACHE_FOLDER}/triton"),
            *pods.env.items(),
        )
    }
    # Who it is: pods of two Jobs under one name, and those that answer at an address, are told apart by it.
    for name, path in (
        ("SFT_POD_UID", "metadata.uid"),
        ("SFT_GROUP_UID", "metadata.labels['batch.kubernetes.io/controller-uid']"),
        ("SFT_NODE_NAME", "spec.nodeName"),
        # By which raylets find one another.
        *([("SFT_POD_IP", "status.podIP")] if spec.compute.launcher == "ray" else []),
    ):
        variables[name] = {"valueFrom": {"fieldRef": {"fieldPath": path}}}
    # After these, which its values may name: $(SFT_NODE_NAME).
    for given in pods.trainer.get("env", ()):
        variables[given["name"]] = {name: value for name, value in given.items() if name != "name"}
    token = spec.model.token_secret_ref
    if token:
        variables["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}}
    if s3.credentials_secret_ref:
        for name, optional in (
            ("AWS_ACCESS_KEY_ID", False),
            ("AWS_SECRET_ACCESS_KEY", False),
            ("AWS_SESSION_TOKEN", True),
        ):
            reference: Manifest = {"name": s3.credentials_secret_ref, "key": name}
            if optional:
                reference["optional"] = True
            variables[name] = {"valueFrom": {"secretKeyRef": reference}}
    for variable in spec.compute.env:
        variables[variable.name] = variable.model_dump(by_alias=True, exclude_none=True, exclude={"name"})
    return [{"name": name, **source} for name, source in variables.items()]

"""The ConfigMaps: with the trainer's configuration, and with what is known of its run besides."""

from sft_api.numbers import Numbers
from sft_api.place import folder_name
from sft_api.spec_uris import uris_of
from sft_api.trainer_config import BEGUN_FILE, TrainerConfig
from sft_api.v1alpha1 import S3Spec, SFTJob
from sft_api.v1alpha1.job import ObjectMeta

from ..config import StoreSettings
from ..decisions.places import check_place, own_folder
from ..names import CHECKPOINT_URI_ANNOTATION, CONFIG_KEY, EXPORT_URI_ANNOTATION, begun_map_name, config_map_name
from ..picture.observed import Manifest
from .metadata import child_metadata


def effective_s3(job: SFTJob, store: StoreSettings | None) -> S3Spec:
    """How the job's s3:// URIs are reached: as its spec says, or like the platform's store when it says nothing."""
    own = job.spec.checkpoint.s3
    return store.s3 if store and own == S3Spec() else own


def default_checkpoint_uri(job: SFTJob, store: StoreSettings | None) -> str | None:
    """Where the job's checkpoints go when its spec does not say: one place for a name and settings, whatever object."""
    if store is None:
        return None
    identity = job.metadata
    return f"{own_folder(store, identity.namespace)}/{folder_name(identity.name, Numbers.of(job.spec))}"


def trainer_config(
    job: SFTJob, store: StoreSettings | None, gpu_memory: int | None = None, ca_bundle: str = ""
) -> TrainerConfig:
    """The resolved configuration of the run; ``gpu_memory`` is that of GPUs of which its spec does not say it, and
    ``ca_bundle`` holds the platform's own authorities.

    Raises ``ValueError`` when there is no place for checkpoints, or one that goes with the pod, and
    ``PlaceNotAllowed`` when it is another namespace's in the platform's store.
    """
    uris = uris_of(job.spec)
    for field in filter(uris.get, ("checkpoint.uri", "export.uri", "checkpoint.resume.from.uri")):
        if (uri := uris[field]).startswith("file://"):
            raise ValueError(
                f"spec.{field} {uri} is a folder in the pod, which goes with it: in a cluster use "
                "s3://bucket/prefix or pvc://claim/path"
            )
        if store:
            check_place(f"spec.{field}", uri, effective_s3(job, store), store, job.metadata.namespace)
    checkpoint = job.spec.checkpoint.model_copy(update={"s3": effective_s3(job, store)})
    spec = job.spec.model_copy(update={"checkpoint": checkpoint})
    resolved = job.model_copy(update={"spec": spec})
    return TrainerConfig.resolve(
        resolved,
        uid=job.metadata.uid,
        default_checkpoint_uri=default_checkpoint_uri(job, store),
        gpu_memory=gpu_memory,
        ca_bundle=ca_bundle,
    )


def place_annotations(config: TrainerConfig) -> dict[str, str]:
    """Annotations that say where the run saves and exports."""
    places = {CHECKPOINT_URI_ANNOTATION: config.checkpoint_uri, EXPORT_URI_ANNOTATION: config.export_uri}
    return {name: uri for name, uri in places.items() if uri is not None}


def build_config_map(
    job: SFTJob, store: StoreSettings | None, gpu_memory: int | None = None, ca_bundle: str = ""
) -> Manifest:
    """The ConfigMap; raises ``ValueError`` like ``trainer_config``."""
    config = trainer_config(job, store, gpu_memory, ca_bundle)
    text = config.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return config_map(job.metadata, text, place_annotations(config))


def config_map(owner: ObjectMeta, text: str, annotations: dict[str, str]) -> Manifest:
    """The ConfigMap with the configuration ``text``, which never changes while the run lasts."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**child_metadata(owner, config_map_name(owner.name)), "annotations": annotations},
        "immutable": True,
        "data": {CONFIG_KEY: text},
    }


def begun_map(owner: ObjectMeta) -> Manifest:
    """The ConfigMap by which new pods see that the run has begun before them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(owner, begun_map_name(owner.name)),
        "immutable": True,
        # Whose it is: one of an earlier SFTJob of this name may not be deleted yet.
        "data": {BEGUN_FILE: owner.uid},
    }

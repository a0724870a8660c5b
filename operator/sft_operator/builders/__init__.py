"""Pure functions that build the children of an SFTJob as plain dicts. No I/O, no clock, no randomness."""

from .affinity import kept_off
from .config_copy import config_digest, copy_annotations, restored_config_map
from .config_map import begun_map, build_config_map, trainer_config
from .job import build_job
from .metadata import followed_labels, owner_reference
from .network import build_network_policy, build_service
from .pod_group import holds_up, may_hold_up, pod_group_of

__all__ = [
    "begun_map",
    "build_config_map",
    "build_job",
    "build_network_policy",
    "build_service",
    "config_digest",
    "copy_annotations",
    "followed_labels",
    "holds_up",
    "kept_off",
    "may_hold_up",
    "owner_reference",
    "pod_group_of",
    "restored_config_map",
    "trainer_config",
]

"""The headless Service that gives the pods names, and the NetworkPolicy that keeps strangers out."""

from sft_api.progress import PROGRESS_PORT
from sft_api.v1alpha1.job import ObjectMeta

from ..config import NetworkPolicySettings
from ..names import pod_selector
from ..picture.observed import Manifest
from .metadata import child_metadata

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"


def build_service(owner: ObjectMeta) -> Manifest:
    """Names for the pods: ``<name>-<index>.<name>``, before they are ready, since they meet before that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(owner, owner.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pod_selector(owner.name),
            "ports": [{"name": "progress", "port": PROGRESS_PORT, "targetPort": PROGRESS_PORT, "protocol": "TCP"}],
        },
    }


def build_network_policy(owner: ObjectMeta, settings: NetworkPolicySettings) -> Manifest:
    """Who may reach the pods: one another on every port, the operator and Prometheus on the progress port.

    Rendezvous and progress ports are not authenticated. Where the pods may go is not limited: hub and store are
    outside of the cluster more often than not.
    """
    mine = pod_selector(owner.name)
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: settings.operator_namespace}},
        "podSelector": {"matchLabels": settings.operator_labels},
    }
    scrapers: list[Manifest] = [
        {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: namespace}}}
        for namespace in settings.metrics_namespaces
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(owner, owner.name),
        "spec": {
            "podSelector": {"matchLabels": mine},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": mine}}]},
                {"from": [operator, *scrapers], "ports": [{"protocol": "TCP", "port": PROGRESS_PORT}]},
            ],
        },
    }

"""Pods that live on without their trainer, as a container beside it does (a mesh's proxy, a shipper of logs). Pure.

What the cluster puts beside the trainer does not always end with it: only init containers with ``restartPolicy:
Always`` do. The pod then has no end, so that its Job neither fails nor replaces it. It is deleted, and not evicted:
what its trainer has said is to count. (Of one that ended well the run is complete: ``Pod.from_manifest``.) How long it
lives on is measured by watching, as in ``stuck``.
"""

from collections.abc import Mapping

from ..picture.observed import Observed, Pod

LEFT_SECONDS = 30.0
"""In which what ends by itself has ended, mostly."""


def left_since(known: Mapping[str, float], observed: Observed, *, clock: float) -> dict[str, float]:
    """Since when each pod has been seen to live on without its trainer, by uid; ``known`` as of the look before."""
    return {pod.uid: known.get(pod.uid, clock) for pod in observed.active_pods if pod.terminated and not pod.deletion}


def left_pods(observed: Observed, left: Mapping[str, float], *, clock: float) -> list[Pod]:
    """Those that have lived on for so long that they are to be deleted."""
    return [pod for pod in observed.pods if pod.uid in left and clock - left[pod.uid] >= LEFT_SECONDS]

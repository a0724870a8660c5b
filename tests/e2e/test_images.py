"""The repository's own Dockerfiles give images that start as an unprivileged user with everything compiled."""

from __future__ import annotations

import pytest

from tests.cluster.access import Cluster

pytestmark = pytest.mark.cluster


def _run_to_end(cluster: Cluster, namespace: str, image: str, *command: str) -> str:
    """Run one restricted pod with its own command and return what it printed."""
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # no user given: the kubelet takes it from the image, and refuses one that is not numeric
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}, namespace=namespace)
    ended = ("--for=jsonpath={.status.containerStatuses[0].state.terminated.reason}=Completed", "--timeout=180s")
    waited = cluster.kubectl("wait", "pod/one", *ended, f"--namespace={namespace}", check=False, timeout_seconds=200)
    said = cluster.kubectl("logs", "one", f"--namespace={namespace}", check=False).stdout
    if waited.returncode != 0:
        described = cluster.kubectl("describe", "pod", "one", f"--namespace={namespace}", check=False).stdout
        pytest.fail(f"{waited.stderr}\n{said}\n{described[-1500:]}")
    return said


def test_the_operator_starts_as_an_unprivileged_user(cluster: Cluster, namespace: str, operator_image: str) -> None:
    said = _run_to_end(cluster, namespace, operator_image, "python", "-m", "sft_operator", "--help")

    assert "sft_operator" in said


def test_the_trainer_computes_as_an_unprivileged_user(cluster: Cluster, namespace: str, trainer_image: str) -> None:
    program = """
import os, torch, transformers, datasets, boto3, safetensors
import sft_api, sft_trainer
weight = torch.ones(3, requires_grad=True)
(weight * 2).sum().backward()
print("gradient", weight.grad.tolist())
print("user", os.getuid(), os.access(os.environ["HOME"], os.W_OK))
print("compiled", os.path.exists(torch.__cached__), os.path.exists(sft_trainer.__cached__))
import importlib.util
print("megatron", importlib.util.find_spec("megatron"))
import ctypes
# As NCCL opens them; without the first it takes TCP.
print("RDMA", *(ctypes.CDLL(name)._name for name in ("libibverbs.so.1", "libmlx5.so.1")))
"""
    said = _run_to_end(cluster, namespace, trainer_image, "python", "-c", program)

    expected = ["gradient [2.0, 2.0, 2.0]", "user 65532 True", "compiled True True", "megatron None"]
    assert said.splitlines()[-5:] == [*expected, "RDMA libibverbs.so.1 libmlx5.so.1"]


def test_the_image_for_megatron_has_it_beside_all_of_the_trainer(
    cluster: Cluster, namespace: str, megatron_image: str
) -> None:
    program = """
import os, importlib.metadata, pathlib, re, sysconfig
import megatron.core, sft_trainer.strategies.megatron.strategy
here = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
installed = {re.sub("[-_.]+", "-", each.name).lower(): each.version for each in here}
folder = pathlib.Path("/opt/requirements")
def locked(name):
    return dict(re.findall("^([^ =]+)==([^ ]+)", (folder / name).read_text(), re.M))
trainer, megatrons = locked("trainer.txt"), locked("megatron.txt")
print("version", megatron.core.__version__ == installed["megatron-core"])
print("beside", dict(megatrons.items() - trainer.items()).keys(), trainer.keys() - megatrons.keys())
print("installed", megatrons.items() - installed.items(), installed.keys() - megatrons.keys())
print("user", os.getuid(), "compiled", os.path.exists(megatron.core.__cached__))
"""
    said = _run_to_end(cluster, namespace, megatron_image, "python", "-c", program)

    expected = [
        "version True",
        "beside dict_keys(['megatron-core']) set()",
        "installed set() set()",
        "user 65532 compiled True",
    ]
    assert said.splitlines()[-4:] == expected

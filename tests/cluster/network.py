"""The node's network: one bridge that pods hang on, with no way out to other networks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.cluster.state import BRIDGE, BRIDGE_ADDRESS, POD_CIDR

_SYSCTLS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
_RULES = (
    ("INPUT", "-i", BRIDGE, "-j", "ACCEPT"),
    ("FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-j", "ACCEPT"),
    ("FORWARD", "-i", BRIDGE, "!", "-o", BRIDGE, "-j", "REJECT"),  # a test pod has no business elsewhere
)


def create(run_folder: Path, cni_folder: Path) -> None:
    """Make the bridge, let it forward, and write the CNI configuration; repeating it changes nothing."""
    if not Path(f"/sys/class/net/{BRIDGE}").exists() and "KUBE-SERVICES" in _saved("iptables", "nat"):
        raise RuntimeError("another kube-proxy works on this machine (chain KUBE-SERVICES): two cannot share its rules")
    for module in ("br_netfilter", "overlay") if shutil.which("modprobe") else ():  # else they are built in
        subprocess.run(["modprobe", "--quiet", module], check=False)
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    _set_sysctls(run_folder / "sysctls.json")
    for rule in _RULES:
        if not _iptables("--check", *rule):
            _iptables("--insert", *rule)
    cni_folder.mkdir(parents=True, exist_ok=True)
    (cni_folder / "10-bridge.conflist").write_text(json.dumps(_cni_configuration(run_folder / "addresses")))


def remove(run_folder: Path) -> None:
    """Undo `create`: rules, bridge and sysctls as they were before."""
    for command in ("iptables", "ip6tables"):
        _remove_service_rules(command)
    for rule in _RULES:
        while _iptables("--check", *rule):
            _iptables("--delete", *rule)
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "delete", BRIDGE)
    saved = run_folder / "sysctls.json"
    if saved.exists():
        for name, value in json.loads(saved.read_text()).items():
            Path("/proc/sys", name).write_text(value)
        saved.unlink()


def _cni_configuration(address_folder: Path) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,  # pods talk to one another and to this machine, to nobody else
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(address_folder),
            "ranges": [[{"subnet": POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "sfttest", "plugins": [bridge, ports]}


def _set_sysctls(saved: Path) -> None:
    paths = {name: Path("/proc/sys", name) for name in _SYSCTLS}
    if not saved.exists():
        saved.write_text(json.dumps({name: path.read_text().strip() for name, path in paths.items()}))
    for path in paths.values():
        path.write_text("1")


def _saved(command: str, table: str) -> str:
    return subprocess.run([f"{command}-save", "-t", table], capture_output=True, text=True, check=False).stdout


def _remove_service_rules(command: str) -> None:
    """Remove what kube-proxy made: the chains named KUBE-*, and the rules that jump to them."""
    for table in ("filter", "nat", "mangle"):
        saved = _saved(command, table)
        if "KUBE-" not in saved:
            continue
        kept = "\n".join(line for line in saved.splitlines() if "KUBE-" not in line) + "\n"
        subprocess.run([f"{command}-restore", "-T", table], input=kept, text=True, check=True)


def _iptables(*arguments: str) -> bool:
    command = ["iptables", "--wait", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and arguments[0] != "--check":
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.returncode == 0


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")

"""The pods of deploy/kubernetes as hosts of a test: each process as its manifest has it, in namespaces of its own.

What a cluster does is done by hand: names of services, environment, user and rights, a root that can't be written,
volumes, and probes. Policies and limits are not.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.connection import script_texts
from onbeat.base.process.child_process import ChildProcess
from tests.hosts.network import Network
from tests.kubernetes import ROOT, Document, documents, environment, pods, ports, secrets

OF_IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "HOME": "/tmp",
    "PYTHONPATH": str(ROOT),
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What the images set."""
PROGRAMS = ("redis-server", "redis-cli", "setpriv", "unshare", "nsenter")
REDIS = ["sh", "/usr/share/onbeat/redis-start.sh"]
"""The entry point of Redis' image."""
BOOT = """\
set -e; umask 022
mount -t tmpfs -o mode=755 layer "$1"
cd "$1"
mkdir upper work all
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay all
cd all
mount --rbind /proc proc
mount --rbind /dev dev
cp "$2/hosts" etc/hosts
mkdir -p app/configs usr/share/onbeat
mount --bind "$2/texts" usr/share/onbeat
chmod a+x {parents}
{volumes}
mkdir -p .{home}
mount --bind {home} .{home}
mount --bind {home}/configs app/configs
mount -o remount,ro "$1/all"
exec chroot . {command}
"""


class Pods:
    """A context manager. Skips the test where there can be no namespaces."""

    def __init__(self, folder: Path, overlay: Path, account: dict[str, str], names: tuple[str, ...]) -> None:
        """account: what Secret onbeat-objects has. names: APP-NUMBER of each pod."""
        self._folder, self._account, self._names = folder, account, names
        self._found = documents(overlay)
        self._known = secrets(overlay.parent)
        self.network = Network(len(names))
        self.children: dict[str, ChildProcess] = {}
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> Pods:
        if missing := [one for one in PROGRAMS if shutil.which(one) is None]:
            pytest.skip(f"needs {', '.join(missing)}")
        self._ended.enter_context(self.network)
        self.addresses = dict(zip(self._names, self.network.hosts, strict=True))
        lines = [f"{self.addresses[name]} {name.rpartition('-')[0]}" for name in self._names]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        texts = self._folder / "texts"
        script_texts.write_texts(texts)
        for name in ("redis.conf", "redis-start.sh"):
            (texts / name).write_bytes((ROOT / "deploy" / name).read_bytes())
        return self

    def __exit__(self, *_: object) -> None:
        with self._ended:
            for child in reversed(self.children.values()):
                child.terminate()
            for child in reversed(self.children.values()):
                child.stop(grace_s=20.0)

    def start(self, name: str) -> None:
        root = self._folder / name
        root.mkdir()
        pod = self._pod(name)
        rename_interface(self.network, self.addresses[name])
        parents = " ".join(f".{one}" for path in (ROOT, Path(sys.base_prefix)) for one in path.parents)
        volumes = "\n".join(self._volumes(pod))
        script = BOOT.format(parents=parents, volumes=volumes, home=ROOT, command=self._command(name))
        words = ("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", script, "sh")
        self.children[name] = ChildProcess(
            name,
            command=(*self.network.entering(self.addresses[name]), *words, str(root), str(self._folder)),
            environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            log_path=self._folder / f"{name}.log",
        )
        self.children[name].start()

    def is_ready(self, name: str) -> bool:
        """What its two probes say."""
        container, template = self._container(name), self._pod(name)
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            if "exec" in probe:
                if self.run(name, *probe["exec"]["command"]).returncode:
                    return False
            elif "httpGet" in probe:
                port = ports(template)[probe["httpGet"]["port"]]
                try:
                    url = f"http://{self.addresses[name]}:{port}{probe['httpGet']['path']}"
                    if not httpx.get(url, trust_env=False, timeout=10.0).is_success:
                        return False
                except httpx.TransportError:
                    return False
        return True

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` of a pod."""
        there = ("nsenter", "-t", str(self.children[name].pid), "-m", "-n", "-u", "-r", "-w")
        told = (f"{key}={value}" for key, value in self._told(name).items())
        return subprocess.run([*there, "env", "-i", *told, *command], capture_output=True, text=True, check=False)

    def _pod(self, name: str) -> Document:
        return pods(self._found)[name.rpartition("-")[0]]

    def _container(self, name: str) -> Document:
        return self._pod(name)["spec"]["containers"][0]

    def _told(self, name: str) -> dict[str, str]:
        told = environment(self._found, self._known, name.rpartition("-")[0])
        account = self._account if "envFrom" in self._container(name) else {}
        of_pod = {"ONBEAT_NAME": name} if "ONBEAT_NAME" in told else {}
        return OF_IMAGE | account | told | of_pod

    def _command(self, name: str) -> str:
        own, container = self._pod(name)["spec"]["securityContext"], self._container(name)
        rights: dict[str, Any] = container["securityContext"]
        user = str(rights.get("runAsUser", own.get("runAsUser")))
        kept = "".join(f",+{one.lower()}" for one in rights["capabilities"].get("add", ()))
        words = ["setpriv", f"--reuid={user}", "--regid=0", f"--groups={own.get('fsGroup', 0)}", "--no-new-privs"]
        words += [f"--bounding-set=-all{kept}", "--inh-caps=-all"]
        told = (f"{key}={value}" for key, value in self._told(name).items())
        return shlex.join([*words, "env", "-i", *told, *container.get("command", REDIS)])

    def _volumes(self, pod: Document) -> list[str]:
        group = pod["spec"]["securityContext"].get("fsGroup", 0)
        sources = {one["name"]: one for one in pod["spec"]["volumes"]}
        made = []
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            path = mount["mountPath"].lstrip("/")
            how = "mode=755" if mount.get("readOnly") else f"mode=2777,gid={group}"
            made.append(f"mkdir -p {path}; mount -t tmpfs -o {how} {mount['name']} {path}")
            secret = sources.get(mount["name"], {}).get("secret", {}).get("secretName", "")
            for name, text in self._known.get(secret, {}).items():
                made.append(f"printf %s {shlex.quote(text)} > {path}/{name}")
            if mount.get("readOnly"):
                made.append(f"mount -o remount,ro {path}")
        return made


def rename_interface(network: Network, address: str) -> None:
    """A pod's interface is called eth0."""
    words = network.entering(address)
    listed = subprocess.run([*words, "ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    (name,) = [line.split()[1] for line in listed.splitlines() if address in line]
    for change in (("down",), ("name", "eth0"), ("up",)):
        there = "eth0" if change == ("up",) else name
        subprocess.run([*words, "ip", "link", "set", there, *change], check=True)

"""What is wrong with the manifests of deploy/kubernetes, as far as no cluster is needed to see it."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import yaml

from contracts.errors import InvalidInput
from contracts.settings import PREFIX, settings_from
from docs.make_site import metrics

ROOT = Path(__file__).parents[1]
VERSION = "1.37"
PODS = ("Deployment", "StatefulSet")
SERVICES = ("gateway", "reward_service")
"""Modules that say whether they are ready; each process says whether it lives."""
APPLIED = "redis"
"""The overlay over which components are shown."""
OBJECTS = "onbeat-objects"
READ_OBJECTS = "onbeat-objects-read"
"""The Secrets of an object store's accounts: an operator's, with the provider's own variables."""
Document = dict[str, Any]


def closed(required: tuple[str, ...] = (), **properties: Any) -> Document:
    """The schema of a mapping that has no other keys."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def of(kind: str, version: str, spec: Document) -> Document:
    """The schema of an object of this kind and version."""
    metadata = closed(("name",), name={"type": "string"})
    head = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata}
    return closed(("apiVersion", "kind", "metadata", "spec"), **head, spec=spec)


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "array", "items": TEXT}
SCALE_DOWN = closed(stabilizationWindowSeconds=COUNT | {"maximum": 3600})
PROMETHEUS = closed(
    ("type", "metadata"),
    type={"const": "prometheus"},
    metadata=closed(("serverAddress", "query", "threshold"), serverAddress=TEXT, query=TEXT, threshold=TEXT),
)
ENDPOINT = closed(
    ("port",),
    port=TEXT,
    path=TEXT,
    interval=TEXT,
    honorLabels={"type": "boolean"},
    authorization=closed(("credentials",), credentials=closed(("name", "key"), name=TEXT, key=TEXT)),
    relabelings={
        "type": "array",
        "items": closed(("targetLabel",), sourceLabels=TEXTS, targetLabel=TEXT, replacement=TEXT),
    },
)
NAMES = {"type": "object", "additionalProperties": TEXT}
RULE = closed(("alert", "expr", "labels", "annotations"), alert=TEXT, expr=TEXT, labels=NAMES, annotations=NAMES)
RULE["properties"]["for"] = TEXT
PATCHES = {
    "type": "array",
    "items": closed(("target", "patch"), target=closed(("kind", "name"), kind=TEXT, name=TEXT), patch=TEXT),
}
SCHEMAS = {
    "ScaledObject": of(
        "ScaledObject",
        "keda.sh/v1alpha1",
        closed(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=closed(("name",), apiVersion=TEXT, kind=TEXT, name=TEXT),
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=closed(scaleDown=SCALE_DOWN))),
            triggers={"type": "array", "minItems": 1, "items": PROMETHEUS},
        ),
    ),
    "PodMonitor": of(
        "PodMonitor",
        "monitoring.coreos.com/v1",
        closed(
            ("selector", "podMetricsEndpoints"),
            selector=closed(matchLabels=NAMES),
            podMetricsEndpoints={"type": "array", "minItems": 1, "items": ENDPOINT},
        ),
    ),
    "Kustomization": closed(
        ("apiVersion", "kind", "resources"),
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
        kind={"const": "Kustomization"},
        namespace={"const": "onbeat"},
        resources=TEXTS,
        patches=PATCHES,
    ),
    "Component": closed(
        ("apiVersion", "kind", "resources"),
        apiVersion={"const": "kustomize.config.k8s.io/v1alpha1"},
        kind={"const": "Component"},
        resources=TEXTS,
        patches=PATCHES,
    ),
    "PrometheusRule": of(
        "PrometheusRule",
        "monitoring.coreos.com/v1",
        closed(
            ("groups",),
            groups={
                "type": "array",
                "minItems": 1,
                "items": closed(("name", "rules"), name=TEXT, rules={"type": "array", "minItems": 1, "items": RULE}),
            },
        ),
    ),
}
"""Kinds that Kubernetes doesn't have itself → the fields of theirs that are used here."""


def read(path: Path) -> list[Document]:
    """The documents of a YAML file, by libyaml, which is ten times as fast."""
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def kustomization_of(folder: Path) -> Document:
    return read(folder / "kustomization.yaml")[0]


@functools.cache
def built_images() -> set[str]:
    """Those that docker compose builds."""
    services = read(ROOT / "docker-compose.yml")[0]["services"].values()
    return {service["image"] for service in services if "build" in service}


def documents(folder: Path) -> list[Document]:
    """The documents that a kustomization brings; a component is shown over the overlay of APPLIED.

    Raises FileNotFoundError, and KeyError for what a patch doesn't find.
    """
    kustomization = kustomization_of(folder)
    found = documents(folder.parent / APPLIED) if kustomization["kind"] == "Component" else []
    for name in kustomization["resources"]:
        path = (folder / name).resolve(strict=True)
        found += documents(path) if path.is_dir() else read(path)
    for patch in kustomization.get("patches", ()):
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        targets = [one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name)]
        if not targets:
            raise KeyError(f"a patch of {kind} {name} has no target")
        for change in yaml.safe_load(patch["patch"]):
            _change(targets[0], change)
    return found


def _change(document: Document, change: Document) -> None:
    """Makes the changes that patches here ask for: to remove, to replace, to test. Raises KeyError."""
    *parents, last = change["path"].strip("/").split("/")
    place: Any = document
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if last not in place or change["op"] not in ("remove", "replace", "test"):
        raise KeyError(f"a patch can't {change['op']} {change['path']}")
    if change["op"] == "test" and place[last] != change["value"]:
        raise KeyError(f"{change['path']} is {place[last]}, a patch asks for {change['value']}")
    if change["op"] == "replace":
        place[last] = change["value"]
    elif change["op"] == "remove":
        del place[last]


def secrets(folder: Path, **environment: str) -> dict[str, dict[str, str]]:
    """Secret → its keys and values, as make-secrets.sh makes them."""
    command = ["sh", folder / "make-secrets.sh"]
    path = {"PATH": "/usr/bin:/bin"}
    made = subprocess.run(command, env=path | environment, capture_output=True, check=True, text=True).stdout
    return {one["metadata"]["name"]: one["stringData"] for one in yaml.safe_load_all(made)}


def pods(found: list[Document]) -> dict[str, Document]:
    """App → the template of its pods."""
    templates = (one["spec"]["template"] for one in found if one["kind"] in PODS)
    return {one["metadata"]["labels"]["app"]: one for one in templates}


def container_of(found: list[Document], app: str, name: str = "") -> Document:
    """Returns a container of an app's pods by its name; "" for the first one, whose process the app is called after."""
    containers: list[Document] = pods(found)[app]["spec"]["containers"]
    return next(container for container in containers if name in ("", container["name"]))


def environment(found: list[Document], known: dict[str, dict[str, str]], app: str, name: str = "") -> dict[str, str]:
    """The variables of a container's process. Raises KeyError for what nothing defines."""
    container = container_of(found, app, name)
    maps = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    made: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if source.get("secretRef", {}).get("name") not in (OBJECTS, READ_OBJECTS):
            made |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            made[variable["name"]] = known[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        else:
            made[variable["name"]] = variable.get("value", "a-pod")
    return made


def problems(folder: Path) -> list[str]:
    """All of them, in the overlays of this folder; none where they are in order."""
    overlays = sorted(path.parent for path in folder.rglob("kustomization.yaml"))
    read = {path.resolve() for path in folder.rglob("*.yaml") if path.name != "kustomization.yaml"}
    listed = {
        (overlay / name).resolve() for overlay in overlays for name in kustomization_of(overlay).get("resources", ())
    }
    said = [f"{path.name} is in no kustomization" for path in sorted(read - listed)]
    for overlay in overlays:
        said += (f"{overlay.name}: {one}" for one in _of_overlay(overlay, secrets(folder)))
    return said


def _of_overlay(overlay: Path, known: dict[str, dict[str, str]]) -> Iterator[str]:
    yield from _form(kustomization_of(overlay))
    try:
        found = documents(overlay)
    except (FileNotFoundError, KeyError) as error:
        yield str(error)
        return
    names = [(one.get("kind"), one.get("metadata", {}).get("name")) for one in found]
    yield from (f"{one} is there twice" for one in {one for one in names if names.count(one) > 1})
    wrong = [line for one in found for line in _form(one)]
    yield from wrong
    if not wrong:
        yield from _references(found, known, names)
        for app in pods(found):
            yield from _process(found, known, app)


def _form(document: Document) -> tuple[str, ...]:
    return _form_of(json.dumps(document))


@functools.cache
def _form_of(text: str) -> tuple[str, ...]:
    document = json.loads(text)
    try:
        if schema := SCHEMAS.get(str(document.get("kind"))):
            jsonschema.validate(document, schema)
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return (f"{document.get('kind')} {document.get('metadata', {}).get('name', '')}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (str(error),)
    return ()


def ports(template: Document) -> dict[str | int, int]:
    """The ports of a pod, by their names and by their numbers."""
    declared = [one for container in template["spec"]["containers"] for one in container.get("ports", ())]
    return {key: one["containerPort"] for one in declared for key in (one["name"], one["containerPort"])}


def selected(found: list[Document], selector: Document) -> list[str]:
    """The apps whose pods a selector means. Raises ValueError for a label that no pod has."""
    apps = list(pods(found))
    labels = selector.get("matchLabels", {}) | {
        one["key"]: one["values"] for one in selector.get("matchExpressions", ()) if one["operator"] == "In"
    }
    if not selector:
        return apps
    wanted = labels.pop("app", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if labels or not wanted or not set(wanted) <= {*apps}:
        raise ValueError(f"no pods have the labels of {selector}")
    return wanted


def _references(found: list[Document], known: dict[str, dict[str, str]], names: list[tuple[str, str]]) -> Iterator[str]:
    for one in found:
        where, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        try:
            yield from (f"{where}: {line}" for line in _reference(found, known, names, one["kind"], spec))
        except ValueError as error:
            yield f"{where}: {error}"


def _reference(
    found: list[Document], known: dict[str, dict[str, str]], names: list[tuple[str, str]], kind: str, spec: Document
) -> Iterator[str]:
    if kind in PODS and spec["selector"]["matchLabels"] != spec["template"]["metadata"]["labels"]:
        yield "its selector isn't the labels of its pods"
    if kind == "StatefulSet" and ("Service", spec["serviceName"]) not in names:
        yield f"no Service {spec['serviceName']}"
    if kind == "PodDisruptionBudget":
        selected(found, spec["selector"])
    if kind == "Service":
        (app,) = selected(found, {"matchLabels": spec["selector"]})
        for port in spec["ports"]:
            if port.get("targetPort", port["port"]) not in ports(pods(found)[app]):
                yield f"{app} has no port {port.get('targetPort', port['port'])}"
    if kind == "NetworkPolicy":
        apps = selected(found, spec["podSelector"])
        for rule in spec.get("ingress", ()):
            for peer in rule.get("from", ()):
                if "podSelector" in peer:
                    selected(found, peer["podSelector"])
            for name in (port["port"] for port in rule["ports"] if "endPort" not in port):
                if not any(name in ports(pods(found)[app]) for app in apps):
                    yield f"no port {name}"
        for rule in spec.get("egress", ()):
            for peer in (one for one in rule["to"] if "podSelector" in one):
                targets = selected(found, peer["podSelector"])
                # A number: a name would be one of the target's pods, which differ.
                for number in (port["port"] for port in rule["ports"] if "endPort" not in port):
                    if not any(number in ports(pods(found)[app]) for app in targets):
                        yield f"no port {number}"
    if kind == "ScaledObject" and (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) not in names:
        yield f"no {spec['scaleTargetRef']}"
    if kind == "ScaledObject":
        for metric in re.findall(r"onbeat_\w+", " ".join(one["metadata"]["query"] for one in spec["triggers"])):
            if metric not in {one.name for one in metrics()}:
                yield f"no metric {metric}"
    if kind == "Ingress":
        hosts = {host for certificate in spec["tls"] for host in certificate["hosts"]}
        for rule in spec["rules"]:
            if rule["host"] not in hosts:
                yield f"no certificate is of {rule['host']}"
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                yield from _asked_by(found, known, service["name"], service["port"]["name"], rule["host"])
    if kind == "PodMonitor":
        (app,) = selected(found, spec["selector"])
        for endpoint in spec["podMetricsEndpoints"]:
            credentials = endpoint["authorization"]["credentials"]
            if endpoint["port"] not in ports(pods(found)[app]):
                yield f"{app} has no port {endpoint['port']}"
            if credentials["key"] not in known.get(credentials["name"], {}):
                yield f"no secret {credentials}"


def _asked_by(
    found: list[Document], known: dict[str, dict[str, str]], service: str, port: str, host: str
) -> Iterator[str]:
    """Says why a Service can't be asked at a port under a host's name."""
    ports_of = {
        one["metadata"]["name"]: {each["name"] for each in one["spec"]["ports"]}
        for one in found
        if one["kind"] == "Service"
    }
    if port not in ports_of.get(service, ()):
        yield f"no Service {service} has port {port}"
    elif host not in environment(found, known, service)["ONBEAT_ALLOWED_HOSTS"].split(","):
        yield f"{service} doesn't answer to {host}"


def _process(found: list[Document], known: dict[str, dict[str, str]], app: str) -> Iterator[str]:
    pod = pods(found)[app]
    for container in pod["spec"]["containers"]:
        yield from _container(found, known, app, container)
    first, *beside = pod["spec"]["containers"]
    owners = [one for one in found if one["kind"] in PODS and one["spec"]["template"] is pod]
    claimed = [one["metadata"]["name"] for owner in owners for one in owner["spec"].get("volumeClaimTemplates", ())]
    volumes = {one["name"]: one for one in pod["spec"].get("volumes", ())}
    mounts = [[mount["name"] for mount in container["volumeMounts"]] for container in (first, *beside)]
    if sorted(mounts[0]) != sorted([*volumes, *claimed]) or not set().union(*mounts[1:]) <= volumes.keys():
        yield f"{app}: its mounts aren't its volumes"
    claims = {one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"}
    for volume in volumes.values():
        claim, secret = (volume.get(kind, {}) for kind in ("persistentVolumeClaim", "secret"))
        if claim and claim["claimName"] not in claims:
            yield f"{app}: no claim {claim['claimName']}"
        if secret and secret["secretName"] not in known:
            yield f"{app}: no secret {secret['secretName']}"


def _container(found: list[Document], known: dict[str, dict[str, str]], app: str, container: Document) -> Iterator[str]:
    if container["image"] not in built_images():
        yield f"{app}: {container['image']} is built nowhere"
    words = container.get("command", [])
    if "redis" not in container["image"] and (words[:2] != ["python", "-m"] or not _is_module(words[2])):
        yield f"{app}: {words} runs no module"
    try:
        told = environment(found, known, app, container["name"])
        settings = settings_from({name: value for name, value in told.items() if name.startswith(PREFIX)})
        urls = (settings.redis_url, settings.celery_url, settings.reward_url, settings.gateway_url)
        yield from _addresses(found, known, *urls)
    except (InvalidInput, KeyError) as error:
        yield f"{app}: {error}"
    for probe in (container.get("readinessProbe", {}), container["livenessProbe"]):
        asked = probe.get("tcpSocket") or probe.get("httpGet") or {}
        if asked and asked["port"] not in ports(pods(found)[app]):
            yield f"{app}: a probe asks port {asked['port']}"
        if asked.get("path", "/healthz") not in ("/healthz", *(["/readyz"] if set(words) & {*SERVICES} else [])):
            yield f"{app}: a probe asks for {asked['path']}"


def _is_module(name: str) -> bool:
    """Whether `python -m` can run it: a package with a `__main__`, or a module."""
    try:
        found = importlib.util.find_spec(name)
        if found is None or found.submodule_search_locations is None:
            return found is not None
        return importlib.util.find_spec(f"{name}.__main__") is not None
    except ModuleNotFoundError:
        return False


def _addresses(found: list[Document], known: dict[str, dict[str, str]], *urls: str) -> Iterator[str]:
    """Services of the overlay that URLs name, and whether their pods answer to that name."""
    services = {one["metadata"]["name"]: one["spec"]["ports"] for one in found if one["kind"] == "Service"}
    has_redis = "redis" in services
    for url in urls:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port
        if host in ("", "127.0.0.1") or (host == "redis" and not has_redis):
            continue
        if port not in [one["port"] for one in services.get(host, ())]:
            yield f"no Service {host} has port {port}"
        elif host != "redis" and host not in environment(found, known, host)["ONBEAT_ALLOWED_HOSTS"].split(","):
            yield f"{host} doesn't answer to its name"

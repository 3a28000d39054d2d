"""relax-infer config convert."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from relax_infer.cli import app
from relax_infer.config import load_recipe
from tests.cli.conftest import Command

FLAGS = (
    *("--resource", '{"actor": [1, 2], "rollout": [1, 2]}', "--colocate"),
    *("--rm-type", "math", "--hf-checkpoint", "/models/policy"),
    *("--prompt-data", "/data/x.jsonl", "--label-key", "label", "--new-flag", "1"),
)


def test_a_script_becomes_a_recipe_that_tells_what_it_left_out(command: Command, tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"python train.py {' '.join(FLAGS)}".replace("{", "'{").replace("}", "}'"))
    shown = command("config", "convert", str(script), "--name", "mine")
    assert shown.exit_code == 0, shown.output
    assert "# new-flag: is not known and was left out" in shown.stdout
    recipe = load_recipe(yaml.safe_load(shown.stdout))
    assert (recipe.name, recipe.mode, recipe.data.answer_field) == ("mine", "split", "label")


def test_a_script_may_come_by_a_pipe(command: Command):
    flags = [flag.replace("{", "'{").replace("}", "}'") for flag in FLAGS]
    shown = CliRunner().invoke(
        app, ["config", "convert", "-"], f"python train.py {' '.join(flags)}"
    )
    assert shown.exit_code == 0, shown.output
    assert load_recipe(yaml.safe_load(shown.stdout)).mode == "split"


def test_flags_may_be_given_as_they_are(command: Command):
    shown = command("config", "convert", "--", *FLAGS)
    assert shown.exit_code == 0, shown.output
    assert yaml.safe_load(shown.stdout)["rollout"]["model"] == "/models/policy"


def test_a_recipe_that_needs_a_hand_is_printed_and_says_what_for(command: Command):
    shown = command("config", "convert", "--", *FLAGS[:-4])
    assert shown.exit_code == 1
    assert "data:" in shown.stdout
    assert "Name the field with the right answers" in shown.stderr
    crowded = command("config", "convert", "--", *FLAGS, "--rollout-num-gpus", "4")
    assert crowded.exit_code == 1
    assert "cannot be placed" in crowded.stderr


def test_a_script_that_is_not_there(command: Command):
    shown = command("config", "convert", "none.sh")
    assert shown.exit_code == 2
    assert "none.sh cannot be read" in shown.stderr

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.engines.command import CPU_SHIM
from relax_infer.tiny import _maker, ensure_models, models
from relax_infer.tiny.lessons import LESSONS, check_quality, folder_name, seed_of
from relax_infer.tiny.vocabulary import EOS, PAD, TOKENS, decode, encode


def _standing_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> Path:
    """Puts a program in the maker's place; returns the file that lists the calls to it."""
    calls = tmp_path / "calls"
    program = tmp_path / "maker.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, sys
            name, seed, folder = sys.argv[-3:]
            with open({str(calls)!r}, "a") as calls:
                calls.write(name + "\\n")
            """
        )
        + textwrap.dedent(body)
    )
    start = subprocess.Popen

    def popen(command: list[str], **rest: object) -> subprocess.Popen[str]:
        return start([sys.executable, str(program), *command[-3:]], **rest)  # type: ignore[call-overload]

    monkeypatch.setattr(models.subprocess, "Popen", popen)
    return calls


MAKES = """
from relax_infer.tiny.lessons import folder_name
print(name + ": update 100")
(pathlib.Path(folder) / folder_name(name, int(seed))).mkdir()
"""


def test_only_the_policy_depends_on_the_seed():
    assert [folder_name(n, 7) for n in ("policy", "genrm", "teacher")] == [
        "policy-7",
        "genrm",
        "teacher",
    ]
    assert (seed_of("policy", 7), seed_of("genrm", 7)) == (7, LESSONS["genrm"].seed)


def test_missing_models_are_made_and_present_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    calls = _standing_in(monkeypatch, tmp_path, MAKES)
    home = tmp_path / "models"
    (home / "teacher").mkdir(parents=True)
    told: list[str] = []
    made = ensure_models(home, seed=7, progress=told.append)
    assert made == {n: home / folder_name(n, 7) for n in ("policy", "genrm", "teacher")}
    assert sorted(calls.read_text().split()) == ["genrm", "policy"]
    assert "genrm: update 100" in told
    assert ensure_models(home, seed=7) == made
    assert len(calls.read_text().split()) == 2


def test_an_unknown_model_is_refused_before_anything_is_made(tmp_path: Path):
    with pytest.raises(PermanentError, match="no tiny model critic"):
        ensure_models(tmp_path / "models", seed=0, names=["policy", "critic"])
    assert not (tmp_path / "models").exists()


def test_the_reason_of_a_refusal_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    body = f"print('it gets 0.500 right', file=sys.stderr)\nsys.exit({models.REFUSED})"
    _standing_in(monkeypatch, tmp_path, body)
    with pytest.raises(PermanentError, match=r"^it gets 0\.500 right$"):
        ensure_models(tmp_path / "models", seed=0, names=["genrm"])


def test_a_maker_that_breaks_shows_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _standing_in(monkeypatch, tmp_path, "raise OSError('no space')")
    with pytest.raises(PermanentError, match=r"(?s)exit code 1.*OSError: no space"):
        ensure_models(tmp_path / "models", seed=0, names=["genrm"])


def test_a_killed_maker_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _standing_in(monkeypatch, tmp_path, f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(TransientError, match="signal 9"):
        ensure_models(tmp_path / "models", seed=0, names=["genrm"])


@pytest.mark.parametrize(
    ("name", "accuracy"), [("policy", 0.19), ("policy", 0.46), ("teacher", 0.97), ("genrm", 0.97)]
)
def test_a_model_of_the_wrong_quality_is_refused_by_name(name: str, accuracy: float):
    with pytest.raises(PermanentError, match=f"tiny {name} made with seed 4 gets {accuracy:.3f}"):
        check_quality(name, 4, accuracy)


@pytest.mark.parametrize(
    ("name", "accuracy"), [("policy", 0.33), ("teacher", 1.0), ("genrm", 0.99)]
)
def test_a_model_as_it_should_be_is_kept(name: str, accuracy: float):
    check_quality(name, 4, accuracy)


def _with_transformers(code: str, *arguments: str) -> str:
    """What a program says that may import transformers on a machine without CUDA."""
    environment = os.environ | {
        "PYTHONPATH": str(CPU_SHIM),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MAKE_A_SMALL_ONE = """
import dataclasses, json, pathlib, sys
from relax_infer.tiny import _maker, lessons
from transformers import AutoTokenizer, Qwen3ForCausalLM
folder = pathlib.Path(sys.argv[1])
short = dataclasses.replace(lessons.LESSONS["policy"], updates=3, batch=8, accuracy=(0, 1))
lessons.LESSONS["policy"] = short
_maker.make("policy", 5, folder)
saved = AutoTokenizer.from_pretrained(folder / "policy-5")
model = Qwen3ForCausalLM.from_pretrained(folder / "policy-5")
print("told:" + json.dumps({
    "tokens": saved.convert_ids_to_tokens(list(range(len(saved)))),
    "ids": saved("4071>0147?yn, +-*=:#")["input_ids"],
    "text": saved.decode(saved("4071>0147?y")["input_ids"] + [1], skip_special_tokens=True),
    "special": [saved.pad_token_id, saved.eos_token_id, saved.bos_token_id],
    "parameters": sum(weight.numel() for weight in model.parameters()),
    "types": sorted({str(weight.dtype) for weight in model.parameters()}),
    "stops_at": model.generation_config.eos_token_id,
}))
"""


@pytest.mark.timeout(150)
def test_a_saved_model_is_whole_and_its_tokenizer_agrees_with_the_pure_one(tmp_path: Path):
    said = _with_transformers(MAKE_A_SMALL_ONE, str(tmp_path))
    told = json.loads(said.partition("told:")[2])
    assert told["tokens"] == list(TOKENS)
    assert told["ids"] == encode("4071>0147?yn, +-*=:#")
    assert told["text"] == decode([*encode("4071>0147?y"), EOS]) == "4071>0147?y"
    assert told["special"] == [PAD, EOS, None]
    assert (told["parameters"], told["types"], told["stops_at"]) == (78208, ["torch.float32"], EOS)
    assert {path.name for path in tmp_path.iterdir()} == {"policy-5", ".policy-5.lock"}
    config = json.loads((tmp_path / "policy-5" / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    measured = json.loads((tmp_path / "policy-5" / "held_out.json").read_text())
    assert (measured["model"], measured["seed"], measured["problems"]) == ("policy", 5, 512)


def _fills(folder: Path, name: str, seed: int) -> None:
    (folder / "config.json").write_text(f"{name} {seed}")


def test_what_a_killed_maker_left_is_cleared_and_not_taken_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(_maker, "_fill", _fills)
    left = tmp_path / ".policy-5.gone.tmp"
    left.mkdir()
    (left / "config.json").write_text("{")
    _maker.make("policy", 5, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"policy-5", ".policy-5.lock"}
    assert (tmp_path / "policy-5" / "config.json").read_text() == "policy 5"


def test_a_model_that_is_refused_leaves_nothing_to_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refused(folder: Path, name: str, seed: int) -> None:
        _fills(folder, name, seed)
        check_quality(name, seed, 0.5)

    monkeypatch.setattr(_maker, "_fill", refused)
    with pytest.raises(PermanentError, match=r"gets 0\.500"):
        _maker.make("genrm", 5, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".genrm.lock"}


def test_of_two_makers_one_makes_the_model_and_the_other_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The first goes on only when the second was kept out, or came in where it must not."""
    filling, second_has_shown, fills = threading.Event(), threading.Event(), []
    flock = fcntl.flock

    def slow(folder: Path, name: str, seed: int) -> None:
        fills.append(name)
        if filling.is_set():
            second_has_shown.set()
        filling.set()
        assert second_has_shown.wait(10)
        _fills(folder, name, seed)

    def watched(file: Any, operation: int) -> None:
        try:
            flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            second_has_shown.set()
            flock(file, operation)

    monkeypatch.setattr(_maker, "_fill", slow)
    monkeypatch.setattr(_maker.fcntl, "flock", watched)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_maker.make, "policy", 5, tmp_path)
        assert filling.wait(10)
        second = pool.submit(_maker.make, "policy", 5, tmp_path)
        first.result(timeout=20)
        second.result(timeout=20)
    assert fills == ["policy"]

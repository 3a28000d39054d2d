"""Prompts from a file: JSON lines or Parquet, checked row by row, drawn pass by pass."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relax_infer.config import Recipe, RecipeError, load_recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import load_task, make_problems
from relax_infer.samples.file_task import FileTask
from relax_infer.samples.prompt_file import file_sha256
from tests.samples.byte_policy import byte_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_policy(tmp_path_factory.mktemp("models") / "chatty", chat=True)


def file_recipe(policy: str, path: Path | str, **overrides: Any) -> Recipe:
    return load_recipe(
        "quickstart",
        {
            "rollout.model": policy,
            "data.source": "file",
            "data.path": str(path),
            "data.held_out": 2,
            "reward.source": "exact",
            **overrides,
        },
    )


def file_task(policy: str, path: Path | str, **overrides: Any) -> FileTask:
    task = load_task(file_recipe(policy, path, **overrides))
    assert isinstance(task, FileTask)
    return task


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n} + 1 = ?", "answer": n + 1} for n in range(12)]
    return lines(tmp_path / "sums.jsonl", *rows)


def test_a_pass_has_each_row_once_and_the_next_one_another_order(policy: str, sums: Path):
    task = file_task(policy, sums)
    drawn = [p.prompt for step in range(1, 5) for p in task.prompts(7, step, 5)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 10
    assert first != second


def test_where_a_step_is_follows_from_its_number(policy: str, sums: Path):
    """A worker that was killed draws the same prompts again."""
    assert file_task(policy, sums).prompts(7, 3, 5) == file_task(policy, sums).prompts(7, 3, 5)
    assert file_task(policy, sums).prompts(7, 3, 5) != file_task(policy, sums).prompts(8, 3, 5)


def test_a_file_can_be_taken_in_its_own_order(policy: str, sums: Path):
    task = file_task(policy, sums, **{"data.shuffle": False})
    rows = [json.loads(p.metadata)["row"] for p in task.prompts(7, 1, 10)]
    assert rows == sorted(rows)
    assert task.prompts(7, 1, 10) == task.prompts(9, 2, 10)


def test_a_prompt_that_is_held_out_is_not_trained_on_from_any_row(policy: str, tmp_path: Path):
    """By its text: files have the same prompt more than once."""
    rows = [{"prompt": f"q{n % 4}", "answer": "a"} for n in range(40)]
    task = file_task(policy, lines(tmp_path / "f.jsonl", *rows))
    held = {p.prompt for p in task.held_out(2)}
    assert len(held) == 2
    counted = Counter(p.prompt for p in task.prompts(0, 1, 20))
    assert len(counted) == 2
    assert not held & set(counted)
    assert set(counted.values()) == {10}


def test_parquet_holds_the_same_rows_as_json_lines(policy: str, sums: Path, tmp_path: Path):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    other = tmp_path / "sums.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), other)
    assert file_task(policy, other).prompts(0, 1, 10) == file_task(policy, sums).prompts(0, 1, 10)


def test_an_fsspec_url_is_a_path(policy: str, sums: Path):
    assert file_task(policy, sums.as_uri()).held_out(2) == file_task(policy, sums).held_out(2)


def test_fields_may_lie_inside_of_others(policy: str, tmp_path: Path):
    rows = [{"q": {"text": f"q{n}"}, "reward_model": {"ground_truth": "7"}} for n in range(3)]
    names = {
        "data.prompt_field": "q.text",
        "data.answer_field": "reward_model.ground_truth",
    }
    task = file_task(policy, lines(tmp_path / "f.jsonl", *rows), **names)
    assert {p.answer for p in task.prompts(0, 1, 1)} == {"7"}


@pytest.mark.parametrize(
    ("prompt", "overrides", "told"),
    [
        ("2?", {}, "<user>2?\n<assistant>"),
        ("2?", {"data.system_prompt": "Add."}, "<system>Add.\n<user>2?\n<assistant>"),
        ("2?", {"data.chat": False}, "2?"),
        ("2?", {"data.chat": False, "data.system_prompt": "Add."}, "Add.\n\n2?"),
        (
            [{"role": "system", "content": "Own."}, {"role": "user", "content": "2?"}],
            {"data.system_prompt": "Add."},
            "<system>Own.\n<user>2?\n<assistant>",
        ),
        (
            [
                {"role": "user", "content": "1?"},
                {"role": "assistant", "content": "1"},
                {"role": "user", "content": "2?"},
            ],
            {"data.system_prompt": "Add."},
            "<system>Add.\n<user>1?\n<assistant>1\n<user>2?\n<assistant>",
        ),
    ],
    ids=["text", "system", "plain", "plain-system", "own-system", "turns"],
)
def test_what_the_policy_is_told(
    chatty: str, tmp_path: Path, prompt: Any, overrides: dict[str, Any], told: str
):
    rows = [{"prompt": prompt, "answer": "2"}, *({"prompt": f"x{n}", "answer": "0"} for n in "ab")]
    task = file_task(chatty, lines(tmp_path / "f.jsonl", *rows), **{"data.held_out": 1} | overrides)
    problems = {
        json.loads(p.metadata)["row"]: p for p in [*task.prompts(0, 1, 2), *task.held_out(1)]
    }
    assert task.decode(problems[0].prompt_ids) == told


def test_a_response_is_right_where_it_says_the_answer(policy: str, sums: Path):
    task = file_task(policy, sums)
    assert task.check("5", task_ids(task, " 5\n"))
    assert not task.check("5", task_ids(task, "It is 5"))
    pattern = {"data.answer_pattern": r"<answer>(?P<answer>.*?)</answer>"}
    tagged = file_task(policy, sums, **pattern)
    assert tagged.grade("5", task_ids(task, "<answer>4</answer> no: <answer> 5 </answer>")) == 1.0
    assert tagged.grade("5", task_ids(task, "<answer>5</answer> no: <answer>4</answer>")) == 0.0
    assert tagged.grade("5", task_ids(task, "5")) == 0.0


def test_the_last_expression_may_be_what_is_compared(policy: str, sums: Path):
    """For accuracies as for rewards: math_verify is the grader where it is the reward."""
    pytest.importorskip("math_verify")
    task = file_task(policy, sums, **{"reward.source": "math_verify"})
    assert task.check("5", task_ids(task, "The sum is $\\frac{10}{2}$."))
    assert not task.check("5", task_ids(task, "The sum is $6$."))
    assert not file_task(policy, sums).check("5", task_ids(task, "The sum is $5$."))
    chosen = file_task(policy, sums, **{"data.grader": "math_verify"})
    assert chosen.grade("5", task_ids(task, "$5$")) == 1.0


def test_a_file_may_be_held_out_as_a_whole_and_then_nothing_is_left_to_train(
    policy: str, sums: Path
):
    task = file_task(policy, sums, **{"data.held_out": 12})
    assert len({p.prompt for p in task.held_out(12)}) == 12
    with pytest.raises(PermanentError, match="too few different prompts"):
        task.prompts(0, 1, 1)


def test_an_evaluation_may_have_a_file_of_its_own(policy: str, sums: Path, tmp_path: Path):
    rows = [{"prompt": f"{n} * 2 = ?", "answer": 2 * n} for n in range(4)]
    other = lines(tmp_path / "products.jsonl", *rows)
    plan = {"name": "products", "source": "file", "path": str(other), "problems": 4}
    recipe = file_recipe(policy, sums, **{"evaluation.sets": [plan]})
    (each,) = recipe.evaluation.sets
    problems = make_problems(recipe, each)
    assert {p.prompt for p in problems} == {row["prompt"] for row in rows}
    with pytest.raises(RecipeError, match="source file and path belong together"):
        file_recipe(policy, sums, **{"evaluation.sets": [plan | {"path": None}]})


def task_ids(task: FileTask, text: str) -> list[int]:
    return task._text.encode_plain(text)


def test_rows_without_answers_are_for_rewards_that_need_none(policy: str, tmp_path: Path):
    path = lines(tmp_path / "f.jsonl", *({"prompt": f"q{n}"} for n in range(3)))
    with pytest.raises(RecipeError, match="answer_field is empty"):
        file_recipe(policy, path, **{"data.answer_field": ""})
    task = file_task(policy, path, **{"data.answer_field": "", "reward.source": "random"})
    assert task.prompts(0, 1, 1)[0].answer == ""
    assert not task.check("", task_ids(task, ""))


def test_a_row_may_name_its_teacher(policy: str, tmp_path: Path):
    rows = [{"prompt": f"q{n}", "answer": "1", "kind": "code"} for n in range(3)]
    path = lines(tmp_path / "f.jsonl", *rows)
    by_kind = {"data.teacher_field": "kind"}
    with pytest.raises(PermanentError, match="line 1, kind is 'code': the recipe's Teachers are t"):
        file_task(policy, path, **by_kind)
    several = {"teacher.extra_models": [{"model": "/models/code", "model_id": "code"}]}
    task = file_task(policy, path, **by_kind, **several)
    assert json.loads(task.prompts(0, 1, 1)[0].metadata)["teacher"] == "code"


def test_long_prompts_are_left_out_and_counted(policy: str, tmp_path: Path):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in range(1, 9)]
    limit = {"data.max_prompt_tokens": 7}  # each is followed by two line ends
    task = file_task(policy, lines(tmp_path / "f.jsonl", *rows), **limit)
    assert task.left_out == 3
    assert max(len(p.prompt) for p in [*task.prompts(0, 1, 3), *task.held_out(2)]) == 5


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is list, not an object"),
        ('{"text": "a", "answer": "1"}', "line 2 has no field prompt; it has answer, text"),
        ('{"prompt": " ", "answer": "1"}', "line 2, prompt is ' ': neither text nor a list"),
        ('{"prompt": [], "answer": "1"}', r"line 2, prompt is \[\]: neither"),
        ('{"prompt": [{"role": "me", "content": "a"}], "answer": "1"}', r"prompt\[0\] is .*a role"),
        (
            '{"prompt": [{"role": "user"}], "answer": "1"}',
            "a text as its content",
        ),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "answer": "1"}', "assistant's turn"),
        ('{"prompt": "a"}', "line 2 has no field answer"),
        ('{"prompt": "a", "answer": null}', "line 2, answer is None: no right answer"),
        ('{"prompt": "a", "answer": NaN}', "answer is nan: no right answer"),
        ('{"prompt": "a", "answer": true}', "answer is True: no right answer"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(policy: str, tmp_path: Path, second: str, why: str):
    path = tmp_path / "f.jsonl"
    path.write_text(f'{{"prompt": "q", "answer": "1"}}\n{second}\n')
    with pytest.raises(PermanentError, match=why):
        file_task(policy, path)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("f.jsonl", b"", "has no rows"),
        ("f.jsonl", b'{"prompt": "\xff", "answer": "1"}', "line 1 is not JSON"),
        ("f.parquet", b"PAR1", "is no Parquet file"),
        ("f.csv", b"prompt", r"neither \.jsonl nor \.parquet"),
        ("f.jsonl", b'{"prompt": "q", "answer": "1"}', "has 1 rows: too few different prompts"),
        ("f.jsonl", b'{"prompt": "q", "answer": "1"}\n' * 9, "has 9 rows: too few different"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    policy: str, tmp_path: Path, name: str, content: bytes, why: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PermanentError, match=why):
        file_task(policy, tmp_path / name)


def test_a_file_that_is_not_there_is_named(policy: str, tmp_path: Path):
    with pytest.raises(PermanentError, match=r"data\.path: .*none\.jsonl cannot be read"):
        file_task(policy, tmp_path / "none.jsonl")


def test_another_file_than_the_run_began_with_is_refused(policy: str, sums: Path):
    """pains: what a step is trained on must not depend on when it is asked for."""
    pinned = {"data.sha256": file_sha256(str(sums))}
    assert file_task(policy, sums, **pinned).prompts(0, 1, 1)
    sums.write_text(sums.read_text().replace("1 + 1", "1 + 2"))
    with pytest.raises(PermanentError, match="is not the file that"):
        file_task(policy, sums, **pinned)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"data.path": None}, "path and source file belong together"),
        ({"data.source": "tiny.sort4"}, "path and source file belong together"),
        ({"data.answer_pattern": "("}, "no regular expression"),
        ({"data.answer_pattern": "(a)"}, "no group"),
        ({"data.sha256": "abc"}, "64 hexadecimal"),
        ({"data.config": {"size": 3}}, "data.config: is for reasoning_gym"),
        ({"rollout.model": "tiny:policy"}, "22 characters"),
        ({"reward.source": "reasoning_gym"}, "scorers know only their own"),
        ({"reward.source": "genrm"}, "no prompt for a judge"),
    ],
)
def test_a_recipe_that_does_not_fit_its_file(
    policy: str, sums: Path, overrides: dict[str, Any], why: str
):
    with pytest.raises(RecipeError, match=why):
        file_recipe(policy, sums, **overrides)

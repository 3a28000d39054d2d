import random
import subprocess
import sys

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.tasks import Task, UnparsableVerdict
from relax_infer.tiny import Sort4Task
from relax_infer.tiny.examples import judged_answers, right_answers, sloppy_answers, spoilt
from relax_infer.tiny.task import HELD_OUT, split
from relax_infer.tiny.vocabulary import EOS, PAD, TOKENS, decode, encode

TASK: Task = Sort4Task()


def test_ids_are_those_the_checkpoints_are_made_with():
    assert (PAD, EOS, len(TOKENS)) == (0, 1, 32)
    assert encode("0123456789") == list(range(2, 12))
    assert encode("+-*=?:#, yn>") == list(range(12, 24))


def test_text_comes_back_from_its_ids_up_to_the_end_token():
    assert decode([*encode("4071>0147?y"), EOS, *encode("9")]) == "4071>0147?y"


def test_ids_that_are_no_character_are_visible_in_the_text():
    assert decode([PAD, 31, 99, 2]) == "<pad><r31><99>0"


def test_a_character_without_a_token_is_refused():
    with pytest.raises(ValueError, match="'4a>'"):
        encode("4a>")


def test_training_and_held_out_problems_are_all_problems_and_share_none():
    train, held_out = split()
    assert (len(train), len(held_out)) == (9488, HELD_OUT)
    assert {p.prompt for p in train + held_out} == {f"{n:04d}>" for n in range(10_000)}


def test_the_split_is_the_same_everywhere():
    train, held_out = split()
    numbers = list(range(10_000))
    random.Random(0).shuffle(numbers)
    assert [p.prompt for p in held_out + train] == [f"{n:04d}>" for n in numbers]


def test_a_problem_carries_its_ids_and_its_answer():
    problem = next(p for half in split() for p in half if p.prompt == "4071>")
    assert problem.answer == "0147"
    assert problem.prompt_ids == tuple(encode("4071>"))


def test_prompts_depend_on_seed_and_step_and_on_nothing_else():
    drawn = TASK.prompts(3, 7, 32)
    assert drawn == Sort4Task().prompts(3, 7, 32)
    assert drawn != TASK.prompts(3, 8, 32)
    assert drawn != TASK.prompts(4, 7, 32)
    # 3/17 and 31/7 must not become one stream.
    assert TASK.prompts(3, 17, 32) != TASK.prompts(31, 7, 32)


def test_prompts_never_come_from_the_held_out_problems():
    held_out = {p.prompt for p in split()[1]}
    assert not held_out & {p.prompt for p in TASK.prompts(0, 1, 20_000)}


def test_a_short_evaluation_uses_the_first_problems_and_trains_on_the_same():
    short = Sort4Task(held_out=16)
    assert short.held_out(16) == TASK.held_out(16)
    assert short.prompts(0, 1, 8) == TASK.prompts(0, 1, 8)


@pytest.mark.parametrize("wanted", [0, HELD_OUT + 1])
def test_more_or_fewer_held_out_problems_than_there_are_is_an_error(wanted: int):
    with pytest.raises(PermanentError, match=r"data\.held_out"):
        Sort4Task(held_out=wanted)


def test_more_held_out_problems_than_were_kept_is_an_error():
    with pytest.raises(PermanentError, match="17 held-out problems"):
        Sort4Task(held_out=16).held_out(17)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ([*encode("0147"), EOS], True),
        (encode("0147"), False),
        ([*encode("0174"), EOS], False),
        ([*encode("01477"), EOS], False),
        ([*encode("014"), EOS], False),
        ([*encode("0147"), PAD, EOS], False),
        ([EOS], False),
        ([], False),
    ],
)
def test_only_the_sorted_digits_and_an_end_are_right(response: list[int], right: bool):
    assert TASK.check("0147", response) is right


def test_the_judge_reads_prompt_and_answer_without_its_end():
    shown = TASK.judge_prompt(encode("4071>"), [*encode("0147"), EOS])
    assert shown == encode("4071>0147?")


@pytest.mark.parametrize("response", [[], encode("0147")])
def test_an_unfinished_response_is_not_shown_to_the_judge(response: list[int]):
    assert TASK.judge_prompt(encode("4071>"), response) is None


@pytest.mark.parametrize("end", [[], [EOS]])
def test_a_verdict_is_y_or_n_with_or_without_an_end(end: list[int]):
    assert TASK.verdict([*encode("y"), *end]) == 1.0
    assert TASK.verdict([*encode("n"), *end]) == 0.0


@pytest.mark.parametrize(
    "output", [[], [EOS], encode("yn"), encode("3"), [31], [EOS, *encode("y")]]
)
def test_anything_else_is_no_verdict_rather_than_a_bad_one(output: list[int]):
    with pytest.raises(UnparsableVerdict, match="neither y nor n"):
        TASK.verdict(output)


def test_a_spoilt_answer_is_never_the_right_one():
    draw = random.Random(1)
    train, _ = split()
    spoils = {spoilt("1123", draw, train) for _ in range(3000)}
    assert "1123" not in spoils
    assert {len(answer) for answer in spoils} == {3, 4, 5}


def test_the_sloppy_annotator_is_right_now_and_then_and_otherwise_leaves_the_last_digit():
    train, _ = split()
    (problem,) = [p for p in train if p.prompt == "9870>"]
    draw = sloppy_answers([problem])
    rng = random.Random(0)
    answers = [decode(draw(rng)[1]) for _ in range(2000)]
    assert set(answers) == {"0789", "7890"}
    assert 0.15 < answers.count("0789") / 2000 < 0.25


def test_every_lesson_ends_and_is_one_that_the_task_agrees_with():
    train, _ = split()
    rng = random.Random(0)
    teacher, judge = right_answers(train), judged_answers(train)
    for _ in range(500):
        prompt, target = teacher(rng)
        assert TASK.check("".join(sorted(decode(prompt)[:4])), target)
        prompt, target = judge(rng)
        digits, _, shown = decode([*prompt, *target]).partition(">")
        answer, _, said = shown.partition("?")
        assert target[-1] == EOS
        assert said == ("y" if answer == "".join(sorted(digits)) else "n")


def test_the_task_is_loaded_without_torch():
    code = (
        "import sys, relax_infer.tiny; relax_infer.tiny.Sort4Task; relax_infer.tiny.ensure_models;"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

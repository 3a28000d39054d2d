"""Reading verdicts and combining judges: what is doubtful is no score (pains 9 and 10)."""

import math
from typing import Any

import pytest

from relax_infer.config import RecipeError, load_recipe
from relax_infer.config.scoring import Combine, Verdict
from relax_infer.samples import UnparsableVerdict
from relax_infer.scoring.combining import combine
from relax_infer.scoring.verdicts import read_verdict

LINE = Verdict(pattern=r"Score: (?P<score>\S+)", lowest=-10, highest=10, labels={"good": 1.0})
WORD = Verdict(pattern=r"(?P<score>yes|no)", labels={"yes": 1.0, "no": 0.0})
OBJECT = Verdict(lowest=0, highest=10, labels={"bad": 0.0})


@pytest.mark.parametrize(
    ("rule", "text", "number"),
    [
        (LINE, "I think. Score: 7", 7.0),
        (LINE, "Score: -2.5e0", -2.5),
        (LINE, "Score: good", 1.0),
        (LINE, "Score: 0", 0.0),
        (WORD, "The verdict is no.", 0.0),
        (OBJECT, '{"score": 3, "why": "x"}', 3.0),
        (OBJECT, '  {"score": "bad"}\n', 0.0),
        (OBJECT, 'Here:\n```json\n{"score": 0.5}\n```', 0.5),
    ],
)
def test_a_verdict_is_read_by_the_recipes_rule(rule: Verdict, text: str, number: float):
    assert read_verdict(text, rule, "score") == number


@pytest.mark.parametrize(
    ("rule", "text", "says"),
    [
        (LINE, "", "said nothing"),
        (LINE, " \n", "said nothing"),
        (LINE, "I refuse", "0 matches"),
        (LINE, "Score: 1. No: Score: 9", "2 matches"),
        (LINE, "Score: nan", "no number"),
        (LINE, "Score: inf", "no number"),
        (LINE, "Score: 1e999", "inf in"),
        (LINE, f"Score: {'9' * 5000}", "inf in"),
        (LINE, "Score: 11", "not from -10 to 10"),
        (LINE, "Score: None", "no number"),
        (LINE, "Score: 1_0", "no number"),
        (LINE, "Score: ٣", "no number"),
        (LINE, "Score: 0x1", "no number"),
        (WORD, "yes and no", "2 matches"),
        (WORD, "YES", "0 matches"),
        (OBJECT, "null", "no JSON object"),
        (OBJECT, "[1]", "no JSON object"),
        (OBJECT, "{}", "has no score"),
        (OBJECT, '{"score": null}', "has no score"),
        (OBJECT, '{"score": true}', "no number"),
        (OBJECT, '{"score": [1]}', "no number"),
        (OBJECT, '{"score": "3"}', "no number and no label of bad"),
        (OBJECT, '{"score": NaN}', "NaN is no number"),
        (OBJECT, '{"score": Infinity}', "Infinity is no number"),
        (OBJECT, '{"score": 1e999}', "inf in"),
        (OBJECT, '{"score": 1, "score": 9}', "a key comes twice"),
        (OBJECT, '{"score": 1} {"score": 2}', "not JSON"),
        (OBJECT, '```{"score": 1}``` or ```{"score": 2}```', "2 fenced parts"),
        (OBJECT, '{"score": 1', "not JSON"),
        (OBJECT, f'{{"score": {"9" * 5000}}}', "not JSON"),
        (OBJECT, "[" * 100_000, "not JSON"),
        (OBJECT, '{"score": -1}', "not from 0 to 10"),
    ],
)
def test_a_doubtful_answer_is_no_number(rule: Verdict, text: str, says: str):
    with pytest.raises(UnparsableVerdict, match=says) as error:
        read_verdict(text, rule, "score")
    assert len(str(error.value)) < 1000


def test_the_reward_key_picks_one_of_several_values():
    two = Verdict(pattern=r"(?P<style>\d) (?P<truth>\d)?", highest=9)
    assert read_verdict("3 4", two, "style") == 3
    assert read_verdict("3 4", two, "truth") == 4
    with pytest.raises(UnparsableVerdict, match="has no truth"):
        read_verdict("3 ", two, "truth")
    assert read_verdict('{"style": 3, "truth": 4}', OBJECT, "truth") == 4
    with pytest.raises(UnparsableVerdict, match="has no score"):
        read_verdict('{"style": 3, "truth": 4}', OBJECT, "score")


SCORES = {"a": 0.25, "b": 1.0, "c": 0.5}


@pytest.mark.parametrize(
    ("rule", "reward"),
    [
        (Combine(rule="mean"), (0.25 + 1.0 + 0.5) / 3),
        (Combine(rule="min"), 0.25),
        (Combine(rule="max"), 1.0),
        (Combine(rule="all"), 0.0),
        (Combine(rule="all", passes=0.25), 1.0),
        (Combine(rule="weighted", weights={"a": 2, "b": 1, "c": 1}), (0.5 + 1.0 + 0.5) / 4),
    ],
)
def test_judges_are_combined_by_the_declared_rule(rule: Combine, reward: float):
    assert combine(SCORES, rule) == pytest.approx(reward)
    for absent in (None, math.nan, math.inf):
        assert combine({**SCORES, "b": absent}, rule) is None, "the others do not stand in"


def test_nobody_is_no_judge_and_a_judge_without_weight_is_refused():
    with pytest.raises(ValueError, match="no score"):
        combine({}, Combine())
    with pytest.raises(ValueError, match="lacks c"):
        combine(SCORES, Combine(rule="weighted", weights={"a": 1, "b": 1}))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"genrm.prompt": "{response}"}, "belong together"),
        ({"genrm.verdict": {"pattern": "(?P<score>.)"}}, "belong together"),
        ({"genrm.prompt": "{prompt}", "genrm.verdict": {}}, r"must show \{response\}"),
        ({"genrm.prompt": "{response} {gold}", "genrm.verdict": {}}, r"has \{gold\}\. It may show"),
        (
            {"genrm.prompt": "{response}", "genrm.verdict": {"pattern": "("}},
            r"genrm\.verdict\.pattern: is no regular expression",
        ),
        (
            {"genrm.prompt": "{response}", "genrm.verdict": {"pattern": "(?P<mark>.)"}},
            r"no group \(\?P<score>",
        ),
        (
            {"genrm.prompt": "{response}", "genrm.verdict": {"labels": {"good": 2}}},
            r"labels\.good is 2, not from 0 to 1",
        ),
        (
            {"genrm.prompt": "{response}", "genrm.verdict": {"labels": {"good": float("nan")}}},
            "finite",
        ),
        ({"reward.combine.rule": "weighted"}, "has nobody, the judges are judge"),
        ({"reward.unfinished": float("nan")}, "finite"),
        ({"data.source": "reasoning_gym.chain_sum", "rollout.model": "m"}, "no prompt for a judge"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_its_field(overrides: dict[str, Any], says: str):
    with pytest.raises(RecipeError, match=says):
        load_recipe("quickstart", overrides)

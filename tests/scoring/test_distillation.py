"""The four token modes: what is asked, what is written, and that it equals the maths."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from relax_infer.config import Recipe, RecipeError, load_recipe, require_runnable
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import Sample, StagingStore, from_table, generate
from relax_infer.scoring import score_with_teacher, validate_scores, write_back
from relax_infer.scoring.prefills import Piece, pieces
from relax_infer.scoring.top_k import padded, union
from relax_infer.transfer.rows import rows_of_table
from tests.samples.upstream import Upstream
from tests.scoring.models import likeliest, log_probs, policy_answer, teacher_answer

K = 3
MODES = ("student_sampled", "student_topk", "teacher_topk", "union")


def recipe_of(mode: str, **more: Any) -> Recipe:
    return load_recipe(
        "quickstart",
        {
            "rollout.prompts_per_step": 4,
            "rollout.samples_per_prompt": 2,
            "reward.source": "exact",
            "distillation.mode": mode,
            "distillation.top_k": K,
            **more,
        },
    )


async def generated(phase: dict[str, Any], upstream: Upstream, recipe: Recipe) -> StagedRef:
    upstream.fault = policy_answer
    made = await generate(**(phase | {"recipe": recipe}), router_url=upstream.url)
    upstream.fault = teacher_answer
    upstream.asked.clear()
    upstream.payloads.clear()
    upstream.headers.clear()
    return made.staged


async def taught(
    phase: dict[str, Any], upstream: Upstream, recipe: Recipe, source: StagedRef
) -> StagedRef:
    made = await score_with_teacher(
        **(phase | {"recipe": recipe}), source=source, gateway_url=upstream.url
    )
    return made.staged


def joined(
    phase: dict[str, Any], recipe: Recipe, source: StagedRef, lessons: StagedRef
) -> pa.Table:
    made = write_back(
        phase["store"],
        1,
        generated=source,
        judged=None,
        taught=lessons,
        task=phase["task"],
        recipe=recipe,
    )
    return phase["store"].read_table(made.staged)


async def distilled(phase: dict[str, Any], upstream: Upstream, recipe: Recipe) -> pa.Table:
    source = await generated(phase, upstream, recipe)
    return joined(phase, recipe, source, await taught(phase, upstream, recipe, source))


def inline(sample: Sample, mode: str) -> dict[str, Any]:
    """The channels of one sample, token by token from the two models, in plain Python."""
    sampled, ids, teacher, student, ksz = [], [], [], [], []
    for n, token in enumerate(sample.response_ids):
        prefix = [*sample.prompt_ids, *sample.response_ids[:n]]
        of_teacher, of_policy = log_probs("teacher", prefix), log_probs("policy", prefix)
        sampled.append(of_teacher[token])
        mine = [entry[1] for entry in likeliest("policy", prefix, K)]
        theirs = [entry[1] for entry in likeliest("teacher", prefix, K)]
        row = {
            "student_sampled": [],
            "student_topk": mine,
            "teacher_topk": theirs,
            "union": mine + [token for token in theirs if token not in mine],
        }[mode]
        ids.append(row)
        teacher.append([of_teacher[token] for token in row])
        student.append([of_policy[token] for token in row])
        ksz.append(len(row))
    return {"sampled": sampled, "ids": ids, "teacher": teacher, "student": student, "ksz": ksz}


@pytest.mark.parametrize("max_cells", [262_144, 12, 6])
@pytest.mark.parametrize("mode", MODES)
async def test_the_assembled_channels_equal_an_independent_computation(
    phase: dict[str, Any], upstream: Upstream, mode: str, max_cells: int
):
    recipe = recipe_of(mode, **{"teacher.max_logprob_cells": max_cells})
    table = await distilled(phase, upstream, recipe)
    samples = from_table(table)
    assert len(samples) == 8
    assert len({len(s.response_ids) for s in samples}) > 2
    for sample in samples:
        due = inline(sample, mode)
        assert sample.teacher_log_probs is not None
        assert sample.teacher_log_probs == pytest.approx(due["sampled"], rel=1e-6)
        if mode == "student_sampled":
            assert sample.opd_topk_token_ids is None
            continue
        assert sample.opd_topk_token_ids == tuple(map(tuple, due["ids"]))
        assert sample.opd_topk_teacher_log_probs is not None
        for row, expected in zip(sample.opd_topk_teacher_log_probs, due["teacher"], strict=True):
            assert row == pytest.approx(expected, rel=1e-6)
        if mode == "student_topk":
            assert sample.opd_topk_student_log_probs is not None
            for row, expected in zip(
                sample.opd_topk_student_log_probs, due["student"], strict=True
            ):
                assert row == pytest.approx(expected, rel=1e-6)
        else:
            assert sample.opd_topk_student_log_probs is None, "not known of every token: not there"
        if mode == "union":
            assert sample.opd_topk_ksz == tuple(due["ksz"])
            assert set(due["ksz"]) - {K}, "some rows must differ for the test to say something"
    if max_cells == 6 and mode == "union":
        assert len(upstream.asked) == sum(len(s.response_ids) for s in samples)
    assert len(set(upstream.asked)) == len(upstream.asked)


@pytest.mark.parametrize("mode", MODES)
async def test_no_request_asks_for_more_cells_than_the_recipe_allows(
    phase: dict[str, Any], upstream: Upstream, mode: str
):
    recipe = recipe_of(mode, **{"teacher.max_logprob_cells": 14})
    await distilled(phase, upstream, recipe)
    for payload in upstream.payloads:
        ids = payload.get("token_ids_logprob", [])
        positions = len(payload["input_ids"]) - payload["logprob_start_len"] - 1
        cells = positions * (len(ids) + payload.get("top_logprobs_num", 0))
        assert cells <= 14 or positions == 1
        assert len(set(ids)) == len(ids), "each id once"
        assert payload["sampling_params"]["max_new_tokens"] == 0


def test_pieces_are_few_whole_and_in_order():
    rows = [(1, 2), (2, 3), (1, 3), (7, 8), (9, 7)]
    assert pieces(5, None, 0, 1) == [Piece(0, 5, ())]
    assert pieces(5, rows, 0, 1000) == [Piece(0, 5, (1, 2, 3, 7, 8, 9))]
    assert pieces(5, rows, 0, 9) == [Piece(0, 3, (1, 2, 3)), Piece(3, 5, (7, 8, 9))]
    assert pieces(5, rows, 0, 1) == [Piece(n, n + 1, row) for n, row in enumerate(rows)]
    assert pieces(5, None, 4, 8) == [Piece(0, 2, ()), Piece(2, 4, ()), Piece(4, 5, ())]


async def test_a_group_sticks_to_one_replica(
    phase: dict[str, Any], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_of("union", **{"teacher.max_logprob_cells": 6})
    source = await generated(phase, upstream, recipe)
    await taught(phase, upstream, recipe, source)
    by_group: dict[str, set[str]] = {}
    for payload, headers in zip(upstream.payloads, upstream.headers, strict=True):
        group = payload["rid"].split("/")[3].removeprefix("g")
        by_group.setdefault(group, set()).add(headers["X-SMG-Routing-Key"])
    assert by_group == {str(g): {json.dumps(["teacher", g])} for g in range(4)}


async def test_a_sample_is_taught_by_the_teacher_that_its_problem_names(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    recipe = recipe_of("student_sampled")
    source = await generated(phase, upstream, recipe)
    table = store.read_table(source)
    rows = table.to_pylist()
    for row in rows:
        if row["group"] % 2:
            row["metadata"] = json.dumps({"row": 3, "teacher": "code"})
    source = store.write_table("named.arrow", pa.Table.from_pylist(rows, schema=table.schema))
    await taught(phase, upstream, recipe, source)
    asked = {
        (payload["rid"].split("/")[3], payload["model"], headers["X-SMG-Routing-Key"])
        for payload, headers in zip(upstream.payloads, upstream.headers, strict=True)
    }
    models = ["teacher", "code", "teacher", "code"]
    assert asked == {(f"g{g}", m, json.dumps([m, g])) for g, m in enumerate(models)}


async def test_an_empty_response_has_empty_channels_that_are_not_missing(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    recipe = recipe_of("union")
    source = await generated(phase, upstream, recipe)
    table = store.read_table(source)
    rows = table.to_pylist()
    for name in ("response_ids", "rollout_log_probs", "loss_mask"):
        rows[3][name] = []
    rows[3] |= {"student_topk_token_ids": [], "student_topk_log_probs": []}
    source = store.write_table("emptied.arrow", pa.Table.from_pylist(rows, schema=table.schema))
    lessons = await taught(phase, upstream, recipe, source)
    (empty,) = [s for s in from_table(joined(phase, recipe, source, lessons)) if not s.response_ids]
    assert (empty.group, empty.sample) == (1, 1)
    assert empty.teacher_log_probs == empty.opd_topk_token_ids == empty.opd_topk_ksz == ()
    assert not [rid for rid in upstream.asked if "/g1/s1/" in rid]


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: m.pop("input_top_logprobs"), "lacks 'input_top_logprobs'"),
        (lambda m: m.pop("input_token_ids_logprobs"), "lacks 'input_token_ids_logprobs'"),
        (lambda m: m.pop("input_token_logprobs"), "lacks 'input_token_logprobs'"),
        (lambda m: m["input_top_logprobs"].pop(), "rows of input_top_logprobs"),
        (lambda m: m["input_top_logprobs"][-1].pop(), "teacher_topk_log_probs has 2 tokens"),
        (
            lambda m: m["input_top_logprobs"].__setitem__(-1, None),
            "teacher_topk_log_probs has None where a row is due",
        ),
        (
            lambda m: m["input_top_logprobs"][-1].__setitem__(0, m["input_top_logprobs"][-1][1]),
            "teacher_topk_log_probs has 3 tokens in a row, not 3",
        ),
        (
            lambda m: m["input_token_ids_logprobs"][-1].pop(),
            "teacher_at_student_topk_log_probs lacks token",
        ),
        (
            lambda m: m["input_token_ids_logprobs"][-1][0].__setitem__(0, float("nan")),
            "teacher_at_student_topk_log_probs has .* no log-prob",
        ),
        (
            lambda m: m["input_token_ids_logprobs"][-1][0].__setitem__(1, "3"),
            "teacher_at_student_topk_log_probs has .* no log-prob",
        ),
        (
            lambda m: m["input_top_logprobs"][-1][0].__setitem__(0, None),
            "teacher_topk_log_probs has .* no log-prob",
        ),
        (
            lambda m: m["input_token_logprobs"][-1].__setitem__(0, True),
            "teacher_log_probs has .* no log-prob",
        ),
        (lambda m: m["input_token_logprobs"][-1].__setitem__(1, 30), "of other tokens"),
    ],
)
async def test_a_faulty_teacher_is_named_with_sample_and_field_and_leaves_no_row(
    phase: dict[str, Any], upstream: Upstream, spoil: Spoil, says: str
):
    """Pain 14: nothing takes the place of a log-prob that did not come."""
    recipe = recipe_of("union")
    source = await generated(phase, upstream, recipe)

    def spoilt(payload: dict[str, Any]) -> dict[str, Any]:
        answer = teacher_answer(payload)
        if "/g2/s1/" in payload["rid"]:
            spoil(answer["meta_info"])
        return answer

    upstream.fault = spoilt
    with pytest.raises(PermanentError, match=f"step 1 group 2 sample 1: .*{says}"):
        await taught(phase, upstream, recipe, source)
    assert 2 not in phase["store"].shards(1, "taught")


async def test_samples_of_another_mode_are_not_taught_over_several_tokens(
    phase: dict[str, Any], upstream: Upstream
):
    source = await generated(phase, upstream, recipe_of("student_sampled"))
    with pytest.raises(PermanentError, match="student_topk_token_ids is missing"):
        await taught(phase, upstream, recipe_of("student_topk"), source)


async def test_lessons_of_another_mode_are_not_joined(phase: dict[str, Any], upstream: Upstream):
    recipe = recipe_of("student_topk")
    source = await generated(phase, upstream, recipe)
    lessons = await taught(phase, upstream, recipe, source)
    with pytest.raises(PermanentError, match="teacher_topk_token_ids is missing"):
        joined(phase, recipe_of("teacher_topk"), source, lessons)


async def test_a_policy_engine_that_names_too_few_tokens_is_refused(
    phase: dict[str, Any], upstream: Upstream
):
    def short(payload: dict[str, Any]) -> dict[str, Any]:
        answer = policy_answer(payload)
        answer["meta_info"]["output_top_logprobs"][0].pop()
        return answer

    upstream.fault = short
    with pytest.raises(PermanentError, match="student_topk_log_probs has 2 tokens in a row, not 3"):
        await generate(**(phase | {"recipe": recipe_of("union")}), router_url=upstream.url)


@pytest.mark.parametrize("mode", MODES)
async def test_write_back_changes_no_earlier_file(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore, mode: str
):
    recipe = recipe_of(mode)
    source = await generated(phase, upstream, recipe)
    lessons = await taught(phase, upstream, recipe, source)
    before = [store.read_table(ref) for ref in (source, lessons)]
    table = joined(phase, recipe, source, lessons)
    after = [store.read_table(ref) for ref in (source, lessons)]  # also checks their digests
    assert [t.equals(u) for t, u in zip(before, after, strict=True)] == [True, True]
    for name in before[0].column_names:
        if name not in ("reward", "reward_source", "reward_detail", "teacher_log_probs"):
            assert table.column(name).equals(before[0].column(name)), name


async def test_without_top_k_no_file_has_a_further_column(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    """The quickstart's files stay as they were."""
    recipe = recipe_of("student_sampled")
    source = await generated(phase, upstream, recipe)
    lessons = await taught(phase, upstream, recipe, source)
    assert not [n for n in store.read_table(source).column_names if "topk" in n]
    assert store.read_table(lessons).column_names[-1] == "teacher_log_probs"
    assert not [n for n in joined(phase, recipe, source, lessons).column_names if "topk" in n]
    assert all("top_logprobs_num" not in payload for payload in upstream.payloads)


@pytest.mark.parametrize("mode", MODES[1:])
async def test_rows_over_several_tokens_are_published_flat_without_reordering(
    phase: dict[str, Any], upstream: Upstream, mode: str
):
    table = await distilled(phase, upstream, recipe_of(mode))
    published = rows_of_table(table)
    for name in ("opd_topk_token_ids", "opd_topk_teacher_log_probs"):
        flat = [np.concatenate(rows).tolist() for rows in table.column(name).to_pylist()]
        assert [row.tolist() for row in published.ragged(name).rows()] == flat, name
    assert ("opd_topk_ksz" in published.columns) == (mode == "union")
    assert ("opd_topk_student_log_probs" in published.columns) == (mode == "student_topk")


def test_consumers_that_want_a_rectangle_get_the_references_filler():
    ids, ksz = np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([2, 3])
    assert padded(ids, ksz, 4, -1).tolist() == [[5, 6, -1, -1], [7, 8, 9, -1]]


def test_the_policys_log_probs_stand_beside_every_token_once_they_are_known():
    """What a student-scoring phase will bring: the union then has the policy's channel, too."""
    mine = np.array([[1, 2], [3, 4]])
    theirs = np.array([[2, 5], [6, 7]])
    at = {token: -float(token) for token in range(8)}
    table = {
        name: np.vectorize(at.get)(ids) + shift
        for name, ids, shift in (
            ("student", mine, 0),
            ("teacher_at_mine", mine, -10),
            ("teacher", theirs, -10),
            ("student_at_theirs", theirs, 0),
        )
    }
    made = union(
        mine,
        table["student"],
        table["teacher_at_mine"],
        theirs,
        table["teacher"],
        table["student_at_theirs"],
    )
    assert made.student is not None
    assert made.ids.tolist() == [1, 2, 5, 3, 4, 6, 7]
    assert made.ksz.tolist() == [3, 4]
    assert made.student.tolist() == [-float(token) for token in made.ids]
    assert made.teacher.tolist() == [-float(token) - 10 for token in made.ids]


def whole(**changes: Any) -> Sample:
    return Sample.model_construct(
        **{
            "step": 1,
            "group": 0,
            "sample": 0,
            "response_ids": (3, 1),
            "rollout_log_probs": (-1.0, -1.0),
            "loss_mask": (1, 1),
            "reward": 1.0,
            "teacher_log_probs": (-1.0, -1.0),
            "opd_topk_token_ids": ((1, 2), (3, 4, 5)),
            "opd_topk_teacher_log_probs": ((-1.0, -1.0), (-1.0, -1.0, -1.0)),
            "opd_topk_ksz": (2, 3),
        }
        | changes
    )


IDS, LOGS = "opd_topk_token_ids", "opd_topk_teacher_log_probs"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({IDS: None}, f"{IDS} is missing"),
        ({LOGS: None}, f"{LOGS} is missing"),
        ({"opd_topk_ksz": None}, "opd_topk_ksz is missing"),
        ({IDS: ((1, 2),)}, f"{IDS} has 1 entries for 2 tokens"),
        ({"opd_topk_ksz": (2,)}, "opd_topk_ksz has 1 entries for 2 tokens"),
        ({"opd_topk_ksz": (2, 9)}, "opd_topk_ksz is not from 2 to 4"),
        ({"opd_topk_ksz": (1, 3)}, "opd_topk_ksz is not from 2 to 4"),
        ({IDS: ((1, 2), (3, 4))}, f"{IDS} has a row that is not as wide"),
        ({LOGS: ((-1.0, -1.0), (-1.0,))}, f"{LOGS} has a row that is not as wide"),
        ({IDS: ((1, 2), (3, 4, 3))}, f"{IDS} names an id twice"),
        ({IDS: ((1, 2), (3, 4, -1))}, f"{IDS} has an id that is no token"),
        ({IDS: ((1, 2), (3, 4, 32))}, f"{IDS} has an id that is no token"),
        ({IDS: ((1, 2), (3, 4, None))}, f"{IDS} holds a null"),
        ({LOGS: ((-1.0, -1.0), None)}, f"{LOGS} lacks a token's row"),
        ({LOGS: ((-1.0, float("nan")), (-1.0,) * 3)}, f"{LOGS} is not finite"),
        ({LOGS: ((-1.0, -1.0), (-1.0, -1.0, 0.5))}, f"{LOGS} is above 0"),
        ({"opd_topk_student_log_probs": ((-1.0,), (-1.0,) * 3)}, ".* not as wide"),
        ({"teacher_log_probs": (-1.0, 0.5)}, "teacher_log_probs is above 0"),
        ({"loss_mask": (1, 2)}, "loss_mask has another value than 0 and 1"),
    ],
)
def test_a_faulty_channel_is_named_with_its_sample(changes: dict[str, Any], says: str):
    def check(sample: Sample) -> None:
        validate_scores(
            [sample], needs_reward=True, needs_teacher=True, mode="union", top_k=2, vocab_size=32
        )

    check(whole())
    with pytest.raises(PermanentError, match=f"step 1 group 0 sample 0: {says}"):
        check(whole(**changes))


@pytest.mark.parametrize("mode", MODES)
def test_a_run_can_be_distilled_in_each_mode(mode: str):
    require_runnable(recipe_of(mode))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"rollout.sampling.temperature": 0.7}, "temperature: 0.7 with distillation"),
        ({"teacher.max_logprob_cells": 5}, r"max_logprob_cells: 5, .* may need 6"),
    ],
)
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_mode_that_cannot_be_scored_right_is_refused(
    mode: str, overrides: dict[str, Any], says: str
):
    with pytest.raises(RecipeError, match=says):
        recipe_of(mode, **overrides)

"""relax-infer samples: what it finds, filters and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.refs import RunRef
from relax_infer.samples import Sample, StagingStore, layout, to_table
from tests.cli.conftest import Command


def sample(group: int, place: int, **changes: Any) -> Sample:
    return Sample(
        **{
            "run": "run-1",
            "step": 2,
            "group": group,
            "sample": place,
            "attempt": 1,
            "rid": "r",
            "prompt": "4071>",
            "prompt_ids": (6, 2, 9, 3, 23),
            "answer": "0147",
            "response": f"01{group}{place}",
            "response_ids": (2, 3, 1),
            "rollout_log_probs": (-0.5, -0.5, -0.5),
            "loss_mask": (1, 1, 1),
            "weight_version": 1,
            "finish_reason": "stop",
        }
        | changes
    )


@pytest.fixture
def store(home: Path) -> StagingStore:
    return StagingStore(RunRef(run="run-1", store=(home / "store").as_uri()))


@pytest.fixture
def scored(store: StagingStore) -> StagingStore:
    rewards = {(0, 0): 1.0, (0, 1): 0.25, (1, 0): None, (1, 1): 0.0}
    rows = [
        sample(*key, reward=reward, reward_detail=None if reward else "unparsable verdict: 'x'")
        for key, reward in rewards.items()
    ]
    store.write_table(layout.phase_file(2, layout.GENERATED), to_table(rows))
    store.write_table(layout.scored(2), to_table(rows))
    return store


def shown(command: Command, *words: str) -> list[str]:
    ended = command("samples", "run-1", "2", *words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout.splitlines()


@pytest.mark.usefixtures("scored")
def test_samples_are_plain_lines_where_nobody_looks_at_a_terminal(command: Command):
    """Also when no server runs any more."""
    assert shown(command) == [
        "group=0 sample=0 reward=1 tokens=3 end=stop prompt='4071>' response='0100' answer='0147'",
        "group=0 sample=1 reward=0.25 tokens=3 end=stop prompt='4071>' response='0101'"
        " answer='0147'",
        "group=1 sample=0 reward=- tokens=3 end=stop prompt='4071>' response='0110' answer='0147'"
        """ detail="unparsable verdict: 'x'\"""",
        "group=1 sample=1 reward=0 tokens=3 end=stop prompt='4071>' response='0111' answer='0147'"
        """ detail="unparsable verdict: 'x'\"""",
        "4 of 4 scored samples of step 2, run run-1",
    ]


@pytest.mark.usefixtures("scored")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--where", "reward<0.5"], ["0/1", "1/1"]),
        (["--where", "reward<=0.25", "--where", "reward > 0"], ["0/1"]),
        (["--where", "reward=null"], ["1/0"]),
        (["--where", "reward!=null"], ["0/0", "0/1", "1/1"]),
        (["--where", "reward!=1"], ["0/1", "1/1"]),
        (["--where", "response~10"], ["0/0", "0/1", "1/0"]),
        (["--where", "finish_reason=length"], []),
        (["--where", "tokens>=3", "--group", "1"], ["1/0", "1/1"]),
        (["--group", "0"], ["0/0", "0/1"]),
        (["--limit", "1"], ["0/0"]),
    ],
)
def test_samples_are_filtered(command: Command, words: list[str], found: list[str]):
    """A score that is not there is less than nothing and no more than anything."""
    document = json.loads("\n".join(shown(command, *words, "--json")))
    assert [f"{row['group']}/{row['sample']}" for row in document] == found


@pytest.mark.usefixtures("scored")
def test_the_last_line_says_how_many_there_are(command: Command):
    last = shown(command, "--where", "reward!=null", "--limit", "2")[-1]
    assert last == "2 of 3 that match, of 4 scored samples of step 2, run run-1"


def test_before_they_are_scored_the_generated_ones_are_shown(command: Command, store: StagingStore):
    store.write_shard(2, layout.GENERATED, 0, 1, to_table([sample(0, 0)]))
    store.write_shard(2, layout.GENERATED, 3, 1, to_table([sample(3, 0)]))
    assert shown(command)[-1] == "2 of 2 being generated samples of step 2, run run-1"
    store.compact(2, layout.GENERATED)
    assert shown(command)[-1] == "2 of 2 generated samples of step 2, run run-1"


@pytest.mark.usefixtures("scored")
def test_in_a_terminal_they_are_a_table_without_control_characters(
    command: Command, store: StagingStore, monkeypatch: pytest.MonkeyPatch
):
    rows = [sample(0, 0, step=3, response="\x1b[31mred [bold]", reward=1.0)]
    store.write_table(layout.scored(3), to_table(rows))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    ended = command("samples", "run-1", "3")
    assert ended.exit_code == 0, ended.output
    assert "┃" in ended.stdout
    assert r"\x1b[31mred [bold]" in ended.stdout


@pytest.mark.usefixtures("scored")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run-1", "7"], "Step 7 of run run-1 keeps no samples. The store has 2"),
        (["run-1", "2", "--group", "9"], "no group 9 among its scored samples. It has 0 to 1"),
        (["run-1", "2", "--where", "loss<1"], "no field loss that can be compared. They have run,"),
        (["run-1", "2", "--where", "prompt_ids=1"], "no field prompt_ids that can be compared"),
        (["run-1", "2", "--where", "reward<low"], "reward is a number, 'low' is none"),
        (["run-1", "2", "--where", "reward"], "'reward' is no condition"),
        (["run-1", "2", "--where", "reward<"], "'reward<' is no condition"),
        (["run-2", "2"], "`relax-infer up`"),
        (["run 1", "2"], "cannot be a run id"),
        (["run-1", "-1"], "-1"),
        (["run-1", "2", "--limit", "0"], "--limit"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_cure(
    command: Command, words: list[str], says: str
):
    ended = command("samples", *words)
    assert ended.exit_code == 2, ended.output
    assert says in " ".join(ended.stderr.split())
    assert ended.stdout == ""

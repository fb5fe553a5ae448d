"""What the artifacts say: keys that Prefect takes, rows a version, episodes with the trained part as code."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.config.schema import TrainConfig
from opentinker_core.names import _NAME
from tasks.progress import Progress, listening, tell
from tasks.report import _episodes, _generated, _given, _slug, _table
from tasks.sessions import end_session, start_session


@given(st.from_regex(_NAME, fullmatch=True))
def test_every_policy_name_gives_a_key_of_letters_digits_and_dashes(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", _slug(name))


def test_table_and_episodes_show_what_the_catalog_has(small: TrainConfig) -> None:
    session = start_session(small, None, None)
    assert _episodes(session) == "No episodes yet."
    version = session.publish(2, session.sft(1, 2))
    session.refresh(version)
    version = session.publish(3, session.sft(3, 3))
    session.refresh(version)
    session.rollout(4)
    session.publish(4, session.update(4))

    rows = _table(session.workspace.catalog.run_versions(session.run.run_id))
    assert [row["step"] for row in rows] == ["4", "3", "2"]
    assert [row["phase"] for row in rows] == ["rl", "sft", "sft"]
    assert rows[2]["reward_mean"] == ""
    assert float(rows[0]["reward_mean"]) >= 0

    text = _episodes(session)
    assert "16 episodes sampled by `tiny-adder@2`" in text
    shown = re.findall(r"\| (\d\+\d=)`", text)
    assert len(shown) == 4
    end_session(session.run.run_id)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" 5", "`  5 `"),
        ("<eos>", "` <eos> `"),
        ("a|b`c``d", "``` a\\|b`c``d ```"),
        ("one\ntwo", "` one⏎ `<br>` two `"),
        ("\n", "` ⏎ `"),
        ("", ""),
    ],
)
def test_what_was_generated_is_code_whatever_it_contains(text: str, shown: str) -> None:
    assert _generated(text) == shown


def test_what_was_given_is_not_interpreted() -> None:
    given = "<|im_start|>*a*\n[b](c) &lt;"
    assert _given(given) == r"\<\|im\_start\|\>\*a\*⏎<br>\[b\](c) \&lt;"


def test_listeners_hear_only_while_they_listen() -> None:
    heard: list[Progress] = []
    told = Progress("id", "name", 1, 2, "rl", {"loss": 0.5})
    with listening(heard.append):
        tell(told)
    tell(told)
    assert heard == [told]

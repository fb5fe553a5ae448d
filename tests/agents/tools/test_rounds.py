"""The loop of a turn with tools: what the agent is shown, in which order, and where it ends."""

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from envs.protocol import Message, Observation
from opentinker_core.agents.coordination.actors import Deadline as TurnDeadline
from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.formats import ToolCall
from opentinker_core.agents.tools.making import open_tools
from opentinker_core.agents.tools.protocol import Deadline, ToolError, ToolResult
from opentinker_core.agents.tools.rounds import Answer
from opentinker_core.config.tools import SandboxSettings, ToolsConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from tests.agents.sandboxes import needs_sandbox
from tests.agents.tools.helpers import CONFIG, QUESTION, Gate, Made, Speaker, call, opened, play
from tests.waiting import PATIENCE_S, wait_until

SUM = call("calculator", '{"expression": "40 + 2"}')


def tool_messages(*texts: str) -> Observation:
    return Observation(tuple(Message("tool", text) for text in texts))


def test_an_answer_without_calls_is_given_to_the_letter() -> None:
    speaker = Speaker([" It is <tool> 4.\n"])
    assert play(opened(Calculator()), speaker) == Answer(" It is <tool> 4.\n", 0, 0)
    assert speaker.shown == [QUESTION]


def test_results_are_shown_in_the_order_of_the_calls_and_it_speaks_again() -> None:
    both = SUM + call("calculator", '{"expression": "2 * 3"}') + call("compass", "{}")
    speaker = Speaker(["Let me see. " + both, SUM, "42"])
    answer = play(opened(Calculator()), speaker)
    assert answer == Answer("42", 2, 4, Counter({ToolError.UNKNOWN_TOOL: 1}))
    unknown = "Error: there is no tool 'compass'; accepted: calculator"
    assert speaker.shown == [QUESTION, tool_messages("42", "6", unknown), tool_messages("42")]


def test_the_order_is_that_of_the_calls_whichever_ends_first() -> None:
    second_done = threading.Event()

    def answer(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        if arguments["n"] == 1:
            assert second_done.wait(PATIENCE_S)  # which only comes if both run side by side
        else:
            second_done.set()
        return ToolResult(str(arguments["n"]))

    speaker = Speaker([call("made", '{"n": 1}') + call("made", '{"n": 2}'), "."])
    play(opened(Made(answer)), speaker)
    assert speaker.shown[1] == tool_messages("1", "2")


def test_calls_of_a_queue_are_made_one_after_the_other() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def answer(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        order.append(arguments["n"])
        with lock:
            running -= 1
        return ToolResult("")

    order: list[int] = []
    tools = opened(Made(answer, "a", queue="q"), Made(answer, "b", queue="q"))
    line = "".join(call("ab"[n % 2], f'{{"n": {n}}}') for n in range(8))
    play(tools, Speaker([line, "."]))
    assert order == list(range(8))
    assert most == 1


def test_after_the_last_round_what_was_said_is_the_answer() -> None:
    tools = opened(Calculator(), config=CONFIG.model_copy(update={"max_rounds": 2}))
    speaker = Speaker([SUM, SUM, f"I think 42. {SUM}{SUM}"])
    answer = play(tools, speaker)
    assert answer == Answer("I think 42.", 2, 2, Counter({ToolError.OVER_LIMIT: 2}))
    assert len(speaker.shown) == 3


def test_calls_beyond_the_limit_of_a_round_are_refused() -> None:
    tools = opened(Calculator(), config=CONFIG.model_copy(update={"max_calls": 2}))
    speaker = Speaker([SUM * 3, "."])
    answer = play(tools, speaker)
    assert answer.errors == Counter({ToolError.OVER_LIMIT: 1})
    refused = "Error: there are more than 2 calls; this one was not made"
    assert speaker.shown[1] == tool_messages("42", "42", refused)


def test_what_cannot_be_read_is_told_and_masked_only_where_it_shall_be() -> None:
    lines = [SUM, f"{SUM}<tool_call>calculator(1)</tool_call>", "<tool_call>", "42"]
    for on_malformed, masked in (("observe", ()), ("mask", (1, 2))):
        tools = opened(Calculator(), config=CONFIG.model_copy(update={"on_malformed": on_malformed}))
        speaker = Speaker(lines)
        answer = play(tools, speaker)
        assert answer.masked == masked
        assert answer.errors == Counter({ToolError.MALFORMED_CALL: 2})
        shown = speaker.shown[2].messages
        assert shown[0].content == "42"
        assert shown[1].content.startswith("Error: this tool call cannot be read: not JSON")


def test_a_last_turn_that_cannot_be_read_is_masked_as_well() -> None:
    tools = opened(Calculator(), config=CONFIG.model_copy(update={"on_malformed": "mask", "max_rounds": 1}))
    assert play(tools, Speaker([SUM, "x <tool_call>{"])).masked == (1,)


@pytest.mark.parametrize(
    ("line", "calls", "text"),
    [
        (f"<think>\nI could say {SUM}\n</think>\n\n42", 0, f"<think>\nI could say {SUM}\n</think>\n\n42"),
        (f"<think>\nand so {SUM}", 0, f"<think>\nand so {SUM}"),
        (f"so {SUM}</think>{SUM}", 1, "."),
        (f"<think>\nso\n</think>\n\n{SUM}", 1, "."),
    ],
    ids=["thought and answer", "thought without an end", "begun by the prompt", "thought and call"],
)
def test_calls_in_reasoning_are_thoughts(line: str, calls: int, text: str) -> None:
    answer = play(opened(Calculator()), Speaker([line, "."]))
    assert (answer.calls, answer.text) == (calls, text)


def test_long_results_are_cut_and_say_so() -> None:
    tools = opened(
        Made(lambda arguments, deadline: ToolResult("x" * int(arguments["n"]))),
        config=CONFIG.model_copy(update={"max_result_chars": 100}),
    )
    speaker = Speaker([call("made", '{"n": 100}') + call("made", '{"n": 1234}'), "."])
    play(tools, speaker)
    cut = "x" * 100 + "\n[cut: the first 100 of 1234 characters]"
    assert speaker.shown[1] == tool_messages("x" * 100, cut)


def test_text_that_no_encoding_holds_is_mended() -> None:
    speaker = Speaker([call("made", "{}"), "."])
    play(opened(Made(lambda arguments, deadline: ToolResult("caf\udce9"))), speaker)
    assert speaker.shown[1] == tool_messages("caf?")


def test_what_has_no_answer_by_the_deadline_has_timed_out_and_the_rest_is_kept() -> None:
    gate = Gate()

    class Passing(TurnDeadline):
        """It passes as soon as the calls have come as far as they can."""

        asked = 0

        @property
        def remaining(self) -> float:
            Passing.asked += 1
            if Passing.asked == 1:
                return PATIENCE_S  # what the calls are given
            gate.reached.wait(PATIENCE_S)
            return 0.0

    def slow(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        if arguments:
            gate.wait()  # it does not keep to its deadline
        return ToolResult("done")

    calls = [ToolCall("slow", {}), ToolCall("slow", {"n": 1}), ToolCall("slow", {})]
    tools = opened(Made(slow, "slow", queue="q"))
    results = asyncio.run(tools.run(calls, Passing(0.0)))
    late = "Error: the time for the answer is over"
    assert results.texts == ("done", late, late)
    assert results.errors == Counter({ToolError.TIMED_OUT: 2})
    gate.open()


def test_a_call_gets_its_own_time_and_not_more_than_the_turn_has() -> None:
    left: list[float] = []

    def answer(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        left.append(deadline.remaining_s())
        return ToolResult("")

    for call_s, turn_s in ((1000.0, 100.0), (100.0, 1000.0)):
        tools = opened(Made(answer), config=CONFIG.model_copy(update={"call_s": call_s}))
        play(tools, Speaker([call("made", "{}"), "."]), turn_s)
    assert all(0 < seconds <= 100 for seconds in left)


def test_an_attempt_that_says_the_same_makes_no_call_twice() -> None:
    made: list[int] = []

    def count(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        made.append(arguments["n"])
        return ToolResult(f"call {len(made)}")

    def attempt(*lines: str) -> list[Observation]:
        speaker = Speaker(lines)
        with suppress(IndexError):  # it has nothing more to say: the attempt fails
            play(tools, speaker)
        return speaker.shown[1:]

    one, two, three = (call("made", f'{{"n": {n}}}') for n in (1, 2, 3))
    tools = opened(Made(count))
    assert attempt(one, two) == [tool_messages("call 1"), tool_messages("call 2")]
    assert attempt(one) == [tool_messages("call 1")]
    assert attempt(one, two, three) == [tool_messages(f"call {n}") for n in (1, 2, 3)]
    assert attempt(one, three, "done") == [tool_messages("call 1"), tool_messages("call 4")]
    assert attempt(one, "done") == [tool_messages("call 5")]
    assert made == [1, 2, 3, 3, 1]


def test_tools_are_closed_once_when_no_call_runs_any_more() -> None:
    gate, closed = Gate(), list[str]()

    def answer(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        gate.wait()
        return ToolResult("")

    tools = opened(Made(answer), on_close=lambda: closed.append("closed"))

    async def cancelled() -> None:
        task = asyncio.create_task(tools.run([ToolCall("made", {})], TurnDeadline.after(PATIENCE_S)))
        await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tools.close()
        tools.close()

    asyncio.run(cancelled())
    assert closed == []
    gate.open()
    wait_until(lambda: closed, "the end of the call")
    with pytest.raises(UsageError, match="these are closed"):
        play(tools, Speaker([call("made", "{}"), "."]))
    assert closed == ["closed"]


def test_what_is_wrong_with_the_installation_is_raised() -> None:
    def answer(arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        raise OpenTinkerError("no sandbox")

    with pytest.raises(OpenTinkerError, match="no sandbox"):
        play(opened(Made(answer)), Speaker([call("made", "{}"), "."]))


@needs_sandbox
def test_programs_of_a_round_see_the_files_of_those_before_and_no_other_agents_do(
    tiny_tokenizer: Any,
) -> None:
    config = ToolsConfig(
        names=("python",), format="hermes", call_s=PATIENCE_S, python=SandboxSettings(seconds=PATIENCE_S)
    )
    write = call("python", "{\"code\": \"open('n', 'a').write('1')\"}")
    read = call("python", '{"code": "print(open(\'n\').read())"}')
    with open_tools(config, tiny_tokenizer) as mine, open_tools(config, tiny_tokenizer) as others:
        speaker = Speaker([write + read + write + read, read, "."])
        play(mine, speaker)
        assert [one.content for one in speaker.shown[1].messages] == [
            "(no output)",
            "1\n",
            "(no output)",
            "11\n",
        ]
        assert speaker.shown[2] == tool_messages("11\n")
        assert play(others, Speaker([read, "."])).errors == Counter({ToolError.FAILED: 1})


def test_declarations_are_those_of_the_tools_unless_the_config_says_no(tiny_tokenizer: Any) -> None:
    with open_tools(CONFIG, tiny_tokenizer) as tools:
        assert [one.name for one in tools.declarations] == ["calculator"]
        assert tools.format.name == "json"
    with open_tools(CONFIG.model_copy(update={"declare": False}), tiny_tokenizer) as tools:
        assert tools.declarations == ()

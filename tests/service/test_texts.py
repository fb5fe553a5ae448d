"""Text that is given out token by token is the text of the whole."""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import resolve
from opentinker_core.service.openai.texts import TextStream


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    renderer = Renderer(tokenizer, "chat")
    stream = TextStream(renderer, tokenizer, stop)
    given = [stream.take(token) for token in tokens]
    return [*given, stream.finish()], renderer.action_text(tokens, stop)


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve("smollm2-135m", Path.home() / ".opentinker"))


@pytest.mark.pretrained
@pytest.mark.parametrize(
    "text", ["größer — 漢字 \U0001f600\U0001f468‍\U0001f469 done", "a  b\n\n c", "naïve e\u0301"]
)
def test_characters_of_several_tokens_come_whole(smollm2: PreTrainedTokenizerBase, text: str) -> None:
    tokens = smollm2.encode(text, add_special_tokens=False)
    given, whole = pieces(smollm2, tokens)
    assert "".join(given) == whole == text
    assert not any("\ufffd" in piece for piece in given)
    assert len([piece for piece in given if piece]) > 3


@pytest.mark.pretrained
def test_any_tokens_give_the_text_of_the_whole(smollm2: PreTrainedTokenizerBase) -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens = generator.integers(0, len(smollm2), generator.integers(1, 20)).tolist()
        given, whole = pieces(smollm2, tokens)
        assert "".join(given) == whole


@pytest.mark.pretrained
def test_stop_strings_and_stop_tokens_are_held_back(smollm2: PreTrainedTokenizerBase) -> None:
    tokens = smollm2.encode("one two STOP here", add_special_tokens=False)
    cut = next(at for at in range(len(tokens)) if "STOP" in smollm2.decode(tokens[: at + 1]))
    given, whole = pieces(smollm2, tokens[: cut + 1], ("STOP", "STUN"))
    assert "".join(given) == whole == "one two "
    assert not any("S" in piece for piece in given)

    almost = smollm2.encode("one two STO", add_special_tokens=False)
    given, whole = pieces(smollm2, almost, ("STOP",))
    assert "".join(given) == whole == "one two STO"

    end = smollm2.encode("done<|im_end|>", add_special_tokens=False)
    given, whole = pieces(smollm2, end)
    assert "".join(given) == whole == "done"

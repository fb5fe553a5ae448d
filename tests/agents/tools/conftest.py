from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.source import resolve


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_home: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve("tiny", tiny_home))

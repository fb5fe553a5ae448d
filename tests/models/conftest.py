from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.settings import Settings
from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.source import ModelSource, resolve


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny(home: Path) -> ModelSource:
    return resolve("tiny", home)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny: ModelSource) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The bundled model of this installation, fetched once a machine."""
    return resolve("smollm2-135m", Settings().home)

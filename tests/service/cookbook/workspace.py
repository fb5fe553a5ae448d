"""A folder whose relative paths shadow names of the hub, and the cookbook's recipes run in it."""

import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.forked import Done, Forks, forks
from tests.service.cookbook import texts

MODEL = "Qwen/Qwen3-8B"
"""What clients call the model; the cookbook chooses its renderer by this name."""
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
LIBRARIES = (
    *("transformers", "datasets", "tinker_cookbook.rl.train", "tinker_cookbook.supervised.train"),
    "tinker_cookbook.preference.train_dpo",
)
"""What recipes import."""


@dataclass(frozen=True)
class Run:
    """A recipe that came to its end."""

    directory: Path
    """Where it logged."""

    def metrics(self) -> list[dict[str, Any]]:
        """What it logged, by step."""
        return _lines(self.directory / "metrics.jsonl")

    def series(self, name: str) -> list[float]:
        """One metric, of the steps that have it."""
        return [row[name] for row in self.metrics() if name in row]

    def checkpoints(self) -> list[dict[str, Any]]:
        """What it saved."""
        return _lines(self.directory / "checkpoints.jsonl")


@dataclass(frozen=True)
class Workspace:
    """The working directory of clients that have no network."""

    directory: Path
    packages: Path
    """The folder in which the cookbook is installed."""

    @classmethod
    def make(cls, directory: Path, packages: Path, model: Path) -> "Workspace":
        """Write the tokenizer and small data sets where clients look for those of the hub."""
        shadow = directory / MODEL
        shadow.mkdir(parents=True)
        for name in TOKENIZER_FILES:
            (shadow / name).write_bytes((model / name).read_bytes())
        for split in ("train", "test"):
            _write(directory / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", _conversations(split))
            _write(directory / "openai" / "gsm8k" / f"{split}.jsonl", _sums(split))
            _write(directory / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", _preferences(split))
        header = "configs:\n- config_name: main\n  data_files:\n"
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        (directory / "openai" / "gsm8k" / "README.md").write_text(f"---\n{header}{files}---\n")
        return cls(directory, packages)

    def python(self, url: str, key: str) -> AbstractContextManager[Forks]:
        """What recipes are run by: clients of `url` that have imported the cookbook's library."""
        return forks(*LIBRARIES, environment=self._environment(url, key))

    def attempt(self, python: Forks, recipe: str, name: str, **config: Any) -> Done:
        """Run a recipe of the cookbook, as its documentation says; it logs below `name`."""
        arguments = [f"{key}={value}" for key, value in config.items()]
        log_path = f"log_path={self.directory / name}"
        module = f"tinker_cookbook.recipes.{recipe}"
        return python.run(module, *arguments, log_path, directory=self.directory)

    def run(self, python: Forks, recipe: str, name: str, **config: Any) -> Run:
        """Run a recipe to its end, which is a good one."""
        done = self.attempt(python, recipe, name, **config)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return Run(self.directory / name)

    def _environment(self, url: str, key: str) -> dict[str, str]:
        mine = {
            "PYTHONPATH": str(self.packages),
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": key,
            "TINKER_TELEMETRY": "0",
            "HF_HOME": str(self.directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
        }
        return {**os.environ, **mine}


def _conversations(split: str) -> Iterable[dict[str, Any]]:
    """Short, and all alike: something to learn in a few steps."""
    random = Random(split)
    words = texts.WORDS.split()
    for _ in range(256):
        thing = random.choice(words)
        question = {"role": "user", "content": f"Where is the {thing}?"}
        answer = {"role": "assistant", "content": f"The {thing} is on the table by the window."}
        yield {"prompt": thing, "messages": [question, answer], "category": "Open QA"}


def _sums(split: str) -> Iterable[dict[str, Any]]:
    random = Random(split)
    for _ in range(256):
        x, y = random.randrange(101), random.randrange(101)
        yield {"question": texts.QUESTION.format(x, y), "answer": f"It is {x + y}.\n#### {x + y}"}


def _preferences(split: str) -> Iterable[dict[str, Any]]:
    """Few to be tested with: the recipe computes the loss of all of them before its first step."""
    random = Random(split)
    for _ in range(256 if split == "train" else 8):
        prompt = f"\n\nHuman: Where is the {random.choice(texts.WORDS.split())}?\n\nAssistant:"
        yield {"chosen": f"{prompt} On the table by the window.", "rejected": f"{prompt} Close the door."}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

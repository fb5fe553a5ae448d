"""Reading training configs: YAML, overrides, and one clear message for every mistake."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.config.loading import apply_override, load_config
from opentinker_core.errors import NotFoundError, UsageError

GOOD = """\
name: sums
policy: {name: adder}
environment: {id: arithmetic, args: {digits: 1}}
rl: {steps: 3, optimizer: {learning_rate: 5e-4}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_reads_a_file_and_overrides_later_ones_winning(config: Path) -> None:
    loaded = load_config(config, ["rl.steps=5", "rl.steps=7", "policy.lora.target_modules=[q_proj, lm_head]"])
    assert loaded.rl is not None
    assert loaded.rl.steps == 7
    assert loaded.rl.optimizer.learning_rate == 5e-4
    assert loaded.policy.lora.target_modules == ("q_proj", "lm_head")


def test_an_override_can_drop_and_add_a_phase(config: Path) -> None:
    loaded = load_config(config, ["rl=null", "sft.steps=2"])
    assert loaded.rl is None
    assert loaded.steps == 2


def test_yaml_keeps_numbers_numbers_and_dates_text(config: Path) -> None:
    loaded = load_config(
        config, ["environment.args.p=1e-3", "environment.args.day=2024-01-01", "policy.start=3"]
    )
    assert loaded.environment.args == {"digits": 1, "p": 1e-3, "day": "2024-01-01"}
    assert loaded.policy.start == "3"


@pytest.mark.parametrize("text", ["-", "+", "#", "a: b", "- x", "x"])
def test_text_that_yaml_would_take_for_more_stays_text(config: Path, text: str) -> None:
    assert load_config(config, [f"environment.args.operations={text}"]).environment.args["operations"] == text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.step=3", ["rl.step", "3", "did you mean 'steps'?", "groups"]),
        ("nonsense.x=3", ["nonsense", "not a known key", "policy"]),
        ("rl.steps=abc", ["rl.steps", "'abc'", "valid integer"]),
        ("policy.lora.rank=-4", ["policy.lora.rank", "-4", "greater than or equal to 1"]),
        ("policy.lora.target_modules=3", ["policy.lora.target_modules", "3", "'all-linear'", "a list"]),
        ("rl.objective.normalizer=mean", ["rl.objective.normalizer", "'mean'", "'tokens'", "'constant'"]),
        ("rl.sampling.stop=['']", ["rl.sampling.stop", "''", "at least 1 character"]),
        ("rl.objective.kl_reference=start", ["rl.objective", "'start'", "a kl_coefficient above 0"]),
        ("rl.optimizer.learning_rate=.inf", ["rl.optimizer.learning_rate", "inf", "finite"]),
        ("policy.name=../x", ["policy.name", "'../x'", "letters, digits"]),
        ("policy=4", ["policy", "4", "base_model"]),
        ("rl=null", ["at least one of the phases", "'sft'"]),
        ("environment={}", ["environment.id", "missing"]),
        ("rl.steps", ["'rl.steps'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("rl..steps=3", ["key=value"]),
        ("policy.name.x=1", ["policy.name is 'adder'", "no keys"]),
        ("rl={", ["'rl={'", "line 1", "not valid YAML"]),
    ],
)
def test_a_wrong_override_names_field_value_and_what_is_accepted(
    config: Path, override: str, expected: list[str]
) -> None:
    text = message(config, override)
    assert "\n" not in text
    assert override in text
    for part in expected:
        assert part in text


def test_several_mistakes_are_all_told_one_line_each(config: Path) -> None:
    text = message(config, "rl.steps=0", "seed=-1")
    assert text.startswith(str(config))
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["seed", "rl.steps"]


_ALIASES = b"a: &a0 ['', '', '']\n" + b"".join(
    f"{'b' * n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 30)
)
"""As many values as there are atoms, of which a message shows some."""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"- 1\n", "is a list"),
        (b"name: a\nname: b\n", "line 2, column 1: not valid YAML: the key 'name' stands here a second time"),
        (b"name: a\n  b: [\n", "line 2"),
        (b"name: \xff\n", "byte 6 is not UTF-8"),
        (b"name: \x00\n", "not valid YAML"),
        (b"? [a]\n: 1\n", "not valid YAML"),
        (b"[" * 5000, "nested too deeply"),
        (b"seed: " + b"9" * 5000, "not valid YAML: Exceeds the limit (4300 digits)"),
        (_ALIASES, "a: ['', '', '']: is not a known key"),
        (b"!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_config_is_refused(config: Path, content: bytes, expected: str) -> None:
    config.write_bytes(content)
    text = message(config)
    assert text.startswith(str(config))
    assert expected in text


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    assert "is a directory" in message(tmp_path)
    assert "cannot be read" in message(tmp_path / "a\0b")


@given(
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers() | st.booleans() | st.floats(0, 1),
)
def test_an_override_sets_exactly_its_key(keys: list[str], value: object) -> None:
    data: dict[str, object] = {"untouched": {"x": 1}}
    apply_override(data, f"{'.'.join(keys)}={yaml.safe_dump(value).splitlines()[0]}")
    here: object = data
    for key in keys:
        assert isinstance(here, dict)
        here = here[key]
    assert here == value
    assert data["untouched"] == {"x": 1}


def test_configs_load_without_torch_or_servers(config: Path) -> None:
    code = (
        "import sys\nfrom opentinker_core.config.loading import load_config\n"
        f"load_config({str(config)!r})\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'pyarrow', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""`gymnasium/<id>`: environments of Gymnasium with numbered actions, as text.

`GymnasiumGame` and `make_game` run in the library's process; `gymnasium_environment` in ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs.adapters.choices import Choices, Illegal
from envs.adapters.hosting import Spec, SplitBy, Splitting, hosted
from envs.adapters.libraries import RefusedError, require_package
from envs.protocol import Action, Environment, Observation, Split, StepResult

PREFIX = "gymnasium/"


@dataclass(frozen=True)
class _View:
    """How one of Gymnasium's own games is told; `describe` has the bare environment and what it shows."""

    rules: str
    actions: tuple[str, ...]
    describe: Callable[[Any, Any], str]


def _lake(env: Any, observation: Any) -> str:
    rows = ["".join(cell.decode() for cell in row) for row in env.desc]
    return _standing(rows, int(observation))


def _cliff(env: Any, observation: Any) -> str:
    rows, columns = env.shape
    last = "S" + "C" * (columns - 2) + "G"
    return _standing(["." * columns] * (rows - 1) + [last], int(observation))


def _standing(rows: list[str], at: int) -> str:
    row, column = divmod(at, len(rows[0]))
    rows[row] = rows[row][:column] + "@" + rows[row][column + 1 :]
    return "\n".join(rows)


def _cards(env: Any, observation: Any) -> str:
    total, dealer, ace = observation
    return f"you {int(total)}{' with an ace as 11' if ace else ''}, dealer {int(dealer)}"


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, goal = env.decode(int(observation))
    places = ("R 0,0", "G 0,4", "Y 4,0", "B 4,3", "the taxi")
    return f"taxi {row},{column}; passenger {places[passenger]}; goal {places[goal]}"


_VIEWS = {
    "FrozenLakeEnv": _View(
        "Walk from S to G over the frozen points F; H is a hole; @ is you. Ice may be slippery.",
        ("left", "down", "right", "up"),
        _lake,
    ),
    "CliffWalkingEnv": _View(
        "Walk from S to G in few steps; C is a cliff, from which you fall back to S; @ is you.",
        ("up", "right", "down", "left"),
        _cliff,
    ),
    "BlackjackEnv": _View("Get nearer to 21 than the dealer, not beyond it.", ("stick", "hit"), _cards),
    "TaxiEnv": _View(
        "Fetch the passenger and bring them to the goal; places are row,column. There are walls.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
    ),
}
"""By the class's name, of those in `gymnasium.envs.toy_text`."""


class GymnasiumGame:
    """An environment of Gymnasium, in its own process."""

    def __init__(
        self,
        env: Any,
        choices: Choices,
        view: Callable[[Any], str],
        opening: str,
        illegal: Illegal,
        penalty: float,
    ) -> None:
        self._env = env
        self._choices = choices
        self._view = view
        self._opening = opening
        self._illegal = illegal
        self._penalty = penalty
        self._legal: list[int] | None = None
        self._count = 0

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`."""
        observation, info = self._env.reset(seed=seed)
        self._count = 0
        return Observation.user(self._opening + self._shown(observation, info))

    def step(self, action: Action) -> StepResult:
        """Play what the action means."""
        number = self._choices.read(action.text)
        if number is None or (self._legal is not None and number not in self._legal):
            self._count += 1
            if self._illegal == "lose":
                info = {"illegal": self._count, "terminated": True, "truncated": False}
                return StepResult(Observation(()), self._penalty, True, info)
            number = self._first()
        observation, reward, terminated, truncated, info = self._env.step(number)
        done = bool(terminated or truncated)
        shown = "\n" + self._shown(observation, info)
        return StepResult(
            Observation(()) if done else Observation.user(shown),
            float(reward),
            done,
            {"illegal": self._count, "terminated": bool(terminated), "truncated": bool(truncated)},
        )

    def close(self) -> None:
        """Give back what the library holds."""
        self._env.close()

    def _first(self) -> int:
        return min(self._legal) if self._legal else int(self._env.action_space.start)

    def _shown(self, observation: Any, info: dict[str, Any]) -> str:
        text = self._view(observation) + "\n"
        mask = info.get("action_mask")
        start = int(self._env.action_space.start)
        self._legal = None if mask is None else [start + at for at, legal in enumerate(mask) if legal]
        return text if self._legal is None else f"{text}legal: {self._choices.listed(self._legal)}\n"


def make_game(
    name: str,
    args: dict[str, Any],
    actions: list[str] | None,
    instruction: str | None,
    illegal: Illegal,
    penalty: float,
) -> GymnasiumGame:
    """Make one, in the library's process.

    Raises:
        RefusedError: it cannot be played by text.
    """
    import gymnasium
    from gymnasium import spaces

    ansi = "ansi" in getattr(_class_of(gymnasium.spec(name)), "metadata", {}).get("render_modes", ())
    env: Any = gymnasium.make(name, **(args | ({"render_mode": "ansi"} if ansi else {})))
    space = env.action_space
    if not isinstance(space, spaces.Discrete):
        raise RefusedError(f"its actions are {space}; accepted: Discrete")
    bare = env.unwrapped
    own = type(bare).__module__.startswith("gymnasium.envs.toy_text")
    known = _VIEWS.get(type(bare).__name__) if own else None
    choices = Choices(int(space.n), actions or (known.actions if known else ()), int(space.start))
    rules = instruction if instruction is not None else known.rules + "\n" if known else ""
    opening = f"{rules}actions: {choices.listed()}\n"
    view = partial(known.describe, bare) if known else _view(env, ansi)
    return GymnasiumGame(env, choices, view, opening, illegal, penalty)


def _view(env: Any, ansi: bool) -> Callable[[Any], str]:
    """What any environment shows: what it renders as text, or its observation."""
    from envs.adapters.spaces import plain, unreadable, written

    if ansi:
        return lambda _: plain(env.render())
    if why := unreadable(env.observation_space):
        raise RefusedError(f"it has {why}, and renders no text")
    return partial(written, env.observation_space)


def _class_of(spec: Any) -> Any:
    import gymnasium.envs.registration

    entry = spec.entry_point
    return gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry


def gymnasium_environment(
    name: str,
    split: Split = "train",
    args: dict[str, Any] | None = None,
    *,
    actions: list[str] | None = None,
    instruction: str | None = None,
    illegal: Illegal = "lose",
    penalty: float = -1.0,
    split_by: SplitBy = "auto",
    held_out: float = 0.2,
) -> Environment:
    """Any environment of Gymnasium with numbered actions; its own arguments beside these.

    Args:
        name: its id in Gymnasium's registry, such as `FrozenLake-v1`.
        split: see `held_out`.
        args: arguments of the environment.
        actions: names of its actions, in the order of their numbers.
        instruction: text put before everything, in place of the rules that are known of the toy texts.
        illegal: what an action that is unreadable or not legal does.
        penalty: the reward of the action that loses by `illegal`.
        split_by: what tells problems of the two splits apart.
        held_out: share of the problems that is held out, where they differ by what is first shown.

    Raises:
        ValueError: the package is missing, or refuses the id or an argument.
    """
    require_package(PREFIX + name, "gymnasium")
    made = {"actions": actions, "instruction": instruction, "illegal": illegal, "penalty": penalty}
    spec = Spec(
        PREFIX + name,
        "envs.adapters.gymnasium_adapter:make_game",
        {"name": name, "args": args or {}} | made,
    )
    environment = hosted(spec, Splitting(split, split_by, held_out))
    assert isinstance(environment, Environment)
    return environment

"""The environment under test: how instances of it are made and played, whatever number of agents it has."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Protocol, Self

from envs import multi_playing, playing
from envs.draws import stable_hash
from envs.multi import MultiEnvironment
from envs.playing import BrokenError, Check, MissingToolError, Plan, Tools
from envs.protocol import Closes
from envs.registry import AnyEnvironment, make_any

Factory = Callable[..., AnyEnvironment]


class Event(Protocol):
    """What an environment showed at a point of an episode: what both kinds of events have."""

    @property
    def shown(self) -> str:
        """All texts."""
        ...

    @property
    def rewards(self) -> tuple[float, ...]:
        """All rewards."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        ...

    @property
    def info(self) -> dict[str, Any]:
        """For the record."""
        ...

    def written(self) -> str:
        """One line, the same for the same event."""
        ...


class NotCheckableError(Exception):
    """A check cannot be made here."""


class Subject:
    """The environment under test, and the episodes that all other plays must repeat.

    As a context: all instances are closed at its end.
    """

    def __init__(
        self,
        environment: str | Factory,
        args: dict[str, Any],
        seeds: int,
        max_turns: int,
        tools: Tools | None = None,
    ) -> None:
        self.args = args
        self.tools = tools
        self.factory: Factory = (
            partial(make_any, environment) if isinstance(environment, str) else environment
        )
        self.id = environment if isinstance(environment, str) else _importable(environment)
        self.name = self.id or str(getattr(environment, "__qualname__", environment))
        chosen = (0, *(stable_hash("seed", index) >> 1 for index in range(1, max(2, seeds))))
        self.plan = Plan(chosen, max_turns)
        self.episodes: dict[str, Any] = {}
        """The reference: the plan played on the first instance; events by `seed script`."""
        self.unplayable = ""
        """Why some demonstrations cannot be played here: those episodes are left out."""
        self._made: list[AnyEnvironment] = []
        self.instance = self.new()
        self.several = isinstance(self.instance, MultiEnvironment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for environment in self._made:
            if isinstance(environment, Closes):
                with suppress(Exception):  # the check of teardown has told of it
                    environment.close()

    def new(self, split: str = "train", *, keep: bool = True) -> Any:
        """A fresh instance; who does not let it be kept closes it."""
        made = self.factory(split=split, **self.args)
        if keep:
            self._made.append(made)
        return made

    def turns(self, environment: Any, seed: int, script: str) -> Iterator[Event]:
        """Play one episode, an event at a time; raises `BrokenError`."""
        if self.several:
            return multi_playing.turns(environment, seed, script, self.plan.max_turns)
        return playing.turns(environment, seed, script, self.plan.max_turns, self.tools)

    def play(self, environment: Any) -> dict[str, list[Event]]:
        """Play all episodes that can be played; raises `BrokenError`."""
        scripts = (
            multi_playing.scripts(environment) if self.several else playing.scripts(environment, self.tools)
        )
        episodes: dict[str, list[Event]] = {}
        for seed in self.plan.seeds:
            for script in scripts:
                try:
                    episodes[f"{seed} {script}"] = list(self.turns(environment, seed, script))
                except MissingToolError as missing:
                    self.unplayable = str(missing)
        return episodes

    def again(self, environment: Any, name: str) -> Iterator[Event]:
        """Play the episode of that name once more."""
        seed, _, script = name.partition(" ")
        return self.turns(environment, int(seed), script)

    def compare(self, name: str, events: list[Event]) -> None:
        """Raise `BrokenError` where events differ from those of the reference episode of that name.

        The error is reported under the check that compared.
        """
        pairs = zip_longest(self.episodes[name], events)
        for turn, (one, other) in enumerate(pairs):
            before, now = one and one.written(), other and other.written()
            if before != now:
                raise BrokenError(
                    Check.SAME_INSTANCE, f"seed and script {name!r}, turn {turn}: {before} became {now}"
                )


@contextmanager
def global_random_kept() -> Iterator[None]:
    """Put the global generators back afterwards."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy and numpy_state:
            numpy.random.set_state(numpy_state)


def _importable(factory: Factory) -> str | None:
    """`module:name` if that is how another process can find the factory."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    return f"{module}:{name}" if found is factory and module != "__main__" else None

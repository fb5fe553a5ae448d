"""OpenEnv's own server with small environments, for a process whose path has `openenv`; prints its port."""

import random
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Told(Observation):
    text: str = ""


class GuessTheNumber(Environment):
    """Find a number of 1 to 20."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.count = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 20, **_: Any) -> Told:
        self.number, self.count = random.Random(seed).randint(1, high), 0
        return Told(text=f"game {seed}: 1-{high}?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        self.count += 1
        if action.guess == 13:
            raise LookupError("13 is unlucky")
        if action.guess == self.number:
            return Told(text="right", reward=1.0, done=True)
        return Told(text="higher" if action.guess < self.number else "lower", done=self.count == 10)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


class Order(Action):
    item: str
    count: int = 1


class Shelf(Observation):
    items: dict[str, int]
    says: dict[str, Any]


class Shop(Environment):
    """Buy everything; one customer at a time."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shelf:
        self.items = {"apple": 2, "pear": 1}
        return self.shelf("good morning")

    def step(self, action: Order, timeout_s: float | None = None, **_: Any) -> Shelf:
        self.items[action.item] -= action.count
        return self.shelf("thanks", reward=True, done=not any(self.items.values()))

    def shelf(self, words: str, **result: Any) -> Shelf:
        return Shelf(items=dict(self.items), says={"words": words}, **result)

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    app = FastAPI()
    app.mount("/guess", create_fastapi_app(GuessTheNumber, Guess, Told, max_concurrent_envs=64))
    app.mount("/shop", create_fastapi_app(Shop, Order, Shelf, max_concurrent_envs=1))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    listening = config.bind_socket()
    listening.listen()  # whoever reads the port may connect at once
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()

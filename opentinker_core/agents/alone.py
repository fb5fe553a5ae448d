"""`Alone`: an environment for one agent as one for several, so that one loop plays both."""

from envs.multi import Actions, Situation, check_actions
from envs.protocol import Environment
from opentinker_core.agents import guarded

AGENT = "agent"
"""The name of the one agent."""


class Alone:
    """Plays `environment` with one agent, named `agent`; if it leaves, the episode is over."""

    agents = (AGENT,)

    def __init__(self, environment: Environment, name: str) -> None:
        """`name`: how errors call the environment."""
        self.environment = environment
        self.concurrent = bool(getattr(environment, "concurrent", False))
        self._name = name
        self._situation = Situation(())

    def reset(self, seed: int) -> Situation:
        """Reset the environment; raises as `guarded.reset`."""
        observation = guarded.reset(self.environment, self._name, seed)
        self._situation = Situation((AGENT,), observations={AGENT: observation})
        return self._situation

    def step(self, actions: Actions) -> Situation:
        """Take the agent's action; raises as `guarded.step`, and RuntimeError if no episode is running."""
        check_actions(self._situation, actions)
        action = actions[AGENT]
        if action is None:
            self._situation = Situation(())
            return self._situation
        result = guarded.step(self.environment, self._name, action)
        to_act = () if result.done else (AGENT,)
        seen = {} if result.done else {AGENT: result.observation}
        self._situation = Situation(
            to_act, observations=seen, rewards={AGENT: result.reward}, info=result.info
        )
        return self._situation

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if callable(close := getattr(self.environment, "close", None)):
            close()

"""Make environments from a config; their errors become the user's."""

from collections.abc import Callable, Collection

import envs.registry
from envs.multi import MultiEnvironment
from envs.protocol import Closes, Environment, Split
from opentinker_core.agents.guarded import described
from opentinker_core.config.schema import EnvironmentConfig, TrainConfig
from opentinker_core.errors import OpenTinkerError, UsageError


def environment_maker(config: EnvironmentConfig, split: Split) -> Callable[[], Environment]:
    """A function that makes a new instance of the configured environment each time it is called.

    Raises:
        UsageError: the id or an argument is unknown or of a wrong type or value; checked at once,
            by making one.
    """

    def make() -> Environment:
        return envs.registry.make(config.id, split, **config.args)

    _tried(make, config.id)
    return make


def joint_maker(
    config: EnvironmentConfig, agents: Collection[str], split: Split
) -> Callable[[], MultiEnvironment]:
    """As `environment_maker`, for one environment of several agents.

    Raises:
        UsageError: as there, or it has other agents than `agents`.
    """

    def make() -> MultiEnvironment:
        return envs.registry.make_multi(config.id, split, **config.args)

    found = _tried(make, config.id)
    if set(found) != set(agents):
        raise UsageError(
            f"protocol.policies: agents {', '.join(agents)}; accepted: those of environment "
            f"{config.id!r}, {', '.join(found)}"
        )
    return make


def check_makeable(config: EnvironmentConfig) -> None:
    """Refuse an environment, of one agent or of several, that cannot be made.

    Raises:
        UsageError: as `environment_maker`.
    """
    _tried(lambda: envs.registry.make_any(config.id, "train", **config.args), config.id)


def check_environments(config: TrainConfig) -> None:
    """Refuse a config whose environments cannot be made.

    Raises:
        UsageError: as `environment_maker` and `joint_maker`.
    """
    if config.joint is not None:
        joint_maker(config.environment, config.joint.protocol.agents, "train")
    else:
        environment_maker(config.environment, "train")
    if config.evaluation.environment is not None:
        environment_maker(config.evaluation.environment, "held_out")


def _tried(make: Callable[[], Environment | MultiEnvironment], id: str) -> tuple[str, ...]:
    """Make one and close it again; its agents, if it has several."""
    try:
        made = make()
        agents: tuple[str, ...] = tuple(made.agents) if isinstance(made, MultiEnvironment) else ()
        if not all(isinstance(agent, str) for agent in agents):
            raise ValueError(f"agents: {agents!r:.200}; accepted: names")
        if isinstance(made, Closes):
            made.close()
    except OpenTinkerError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (Exception, SystemExit) as error:  # foreign code
        raise UsageError(f"environment: {id!r} cannot be made: {described(error)}") from error
    return agents

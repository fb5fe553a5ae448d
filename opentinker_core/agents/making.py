"""Make environments from a config; their errors become the user's."""

from collections.abc import Callable

import envs.registry
from envs.protocol import Environment, Split
from opentinker_core.config.schema import EnvironmentConfig
from opentinker_core.errors import UsageError


def environment_maker(config: EnvironmentConfig, split: Split) -> Callable[[], Environment]:
    """A function that makes a new instance of the configured environment each time it is called.

    Raises:
        UsageError: the id or an argument is unknown or of a wrong type or value; checked at once,
            by making one.
    """

    def make() -> Environment:
        return envs.registry.make(config.id, split, **config.args)

    try:
        make()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return make

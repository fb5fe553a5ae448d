"""What all configs are made of."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from opentinker_core.names import NAME_RULE, check_name


def _name(value: str) -> str:
    try:
        return check_name("name", value)
    except Exception as error:
        raise ValueError(f"not a name; accepted: {NAME_RULE}") from error


Name = Annotated[str, AfterValidator(_name)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Frozen(BaseModel):
    """A config object: immutable, and strict about the keys it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

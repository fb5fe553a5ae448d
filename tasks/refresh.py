"""Let the sampler serve a new version."""

from opentinker_core.policies.types import PolicyVersion
from tasks.phase import phase
from tasks.sessions import session_of


@phase("refresh-sampler", "refresh-sampler[{version.number}]")
def refresh_sampler(run_id: str, version: PolicyVersion) -> None:
    """Load `version` into the sampler; what it served before stays."""
    session_of(run_id).refresh(version)

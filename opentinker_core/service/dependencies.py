"""What routes get by the type of a parameter: the service itself (callers: see `principal`)."""

from typing import Annotated

from fastapi import Depends, Request

from opentinker_core.service.core import Service


async def service_of(request: Request) -> Service:
    """The service that this application serves; were it not `async`, it would be found by a thread."""
    found: Service = request.app.state.service
    return found


Serving = Annotated[Service, Depends(service_of)]

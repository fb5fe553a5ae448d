"""Sampling for clients of OpenAI's API: completions and chat, by base models and by policies."""

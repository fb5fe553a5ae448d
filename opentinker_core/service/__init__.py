"""The service: the Tinker API and an OpenAI-compatible one, for many tenants over shared base models."""

"""Training and sampling through a service, by the official Tinker SDK, behind the interfaces of an engine."""

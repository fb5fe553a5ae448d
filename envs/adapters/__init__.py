"""Environments of other libraries, by our protocols: Gymnasium, PettingZoo, TextArena and OpenEnv servers.

A library runs in processes of its own (`hosting`, `host`); an adapter's module tells both sides what
the library needs.
"""

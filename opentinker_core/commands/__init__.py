"""The commands of the library, mounted by flows/cli.py."""

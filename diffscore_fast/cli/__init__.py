"""The `diffscore` command."""

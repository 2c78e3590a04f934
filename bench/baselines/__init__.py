"""Baselines: what users would otherwise run. Each follows its paper and public behaviour, with good settings."""

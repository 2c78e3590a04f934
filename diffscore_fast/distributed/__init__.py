"""Scoring by many processes."""

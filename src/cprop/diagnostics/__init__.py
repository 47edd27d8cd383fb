"""Diagnostics of a training run: statistics per layer, and advice."""

from cprop.diagnostics.monitor import Monitor

__all__ = ["Monitor"]

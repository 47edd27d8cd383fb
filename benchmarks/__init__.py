"""Benchmarks of the library."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "evidence"
IMAGES = ROOT / "docs" / "images" / "results"

"""The committed runs, in ``experiments/``, and what turns them into pages and figures."""

from pathlib import Path

EVIDENCE = Path(__file__).parent
ROOT = EVIDENCE.parent
IMAGES = ROOT / "docs" / "images" / "results"

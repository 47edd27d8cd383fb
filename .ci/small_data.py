"""Fashion-MNIST's files with a few images of noise, in a folder: enough for the smoke preset."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cprop-lab" / "tests"))

from conftest import write_images

folder = Path(sys.argv[1])
folder.mkdir()
write_images(folder / "fashion_mnist", {"train": 96, "test": 40}, "image", "label", 28, "L", "PNG", 10)

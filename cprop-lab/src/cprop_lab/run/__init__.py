"""One run: what it is, its name, its optimizer, its training, and its cost."""

"""How results are shown: tables, figures, the HTML page, and export to trackers."""

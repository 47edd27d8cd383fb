"""What stored runs say: curves, spread over seeds, groups, pairs, the scoreboard's ranking, verdicts."""

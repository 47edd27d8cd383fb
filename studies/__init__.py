"""Where noise is what limits training: registered experiments. Tasks import nothing of this; it is in their id."""

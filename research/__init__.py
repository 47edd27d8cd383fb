"""The search for a better rule: an ordinary user of the laboratory, ``cprop-lab run EXPERIMENT --with research``."""

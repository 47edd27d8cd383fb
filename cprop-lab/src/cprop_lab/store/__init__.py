"""The store: one Arrow file per run, or one Parquet file per packed experiment; in both, a run is a row.

A store is a folder or an address in an object store, whatever ``pyarrow`` opens. Nothing in it is a
pickle except the checkpoint of an unfinished run, which is read with ``weights_only``. Reading needs no torch.

    runs/<run id>.arrow                   a run: its curves, its specification, how it ended, and its provenance
    checkpoints/<run id>.pt               of a run that is not finished
    experiments/<name>-<preset>.json      an experiment's manifest: which runs belong to it
    experiments/<name>-<preset>.parquet   a packed experiment: its manifest and all of its runs
"""

from cprop_lab.store.rows import SCHEMA, DamagedError, Run, measured
from cprop_lab.store.storage import Manifest, StorageError, Store

__all__ = ["SCHEMA", "DamagedError", "Manifest", "Run", "StorageError", "Store", "measured"]

"""CProp in the tools around it. Each module imports its own framework, and nothing of the library imports them.

===============================  ==============================================================
:mod:`.loggers`                  a monitor's samples to TensorBoard, W&B, MLflow or JSON lines
:mod:`.terminal`                 as a table in the terminal (needs rich)
:mod:`.figure`                   as a figure of the scale over time, by layer (needs matplotlib)
:mod:`.lightning`                a callback for Lightning
:mod:`.transformers`             a callback for Transformers' ``Trainer``
===============================  ==============================================================
"""

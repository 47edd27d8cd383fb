"""Integrations with other tools. Each module imports its own framework; the rest of the library imports none of them.

===============================  ==============================================================
:mod:`.loggers`                  log a monitor's samples to TensorBoard, W&B, MLflow or JSON lines
:mod:`.terminal`                 show them as a table in the terminal (needs rich)
:mod:`.figure`                   plot the scale over time per layer (needs matplotlib)
:mod:`.lightning`                a callback for Lightning
:mod:`.transformers`             a callback for Transformers' ``Trainer``
:mod:`.timm`                     the native optimizers by name in timm
:mod:`.torchtitan`               torchtitan's container of optimizers, with CProp's by name
===============================  ==============================================================
"""

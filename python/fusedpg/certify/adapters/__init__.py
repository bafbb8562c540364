"""Every trainer's drop-in beside the trainer: its own code where PyPI has it, else its formulas transcribed in fp64.

A module for each trainer says how that trainer calls its loss (the forms of its batch, its accumulation over
micro-batches) and yields the rows of `python -m fusedpg parity adapters`.
"""

"""A trainer for BLOOM-class language models whose ``--bitfit`` really freezes.

Importing this package imports nothing heavy: no torch, no DeepSpeed, no GPU.
"""

__version__ = "0.1.0"

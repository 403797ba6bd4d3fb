"""Tensor parallelism: context, tags, collectives, layers, loss, random streams."""

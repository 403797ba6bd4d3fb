"""Indexed files, samples, blends, samplers and loaders."""

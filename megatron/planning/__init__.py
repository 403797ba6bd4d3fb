"""What a run will cost, worked out from its settings without torch and without starting it.

``shape``: tensors, stages, what trains. ``memory``, ``traffic``, ``files``: bytes held, moved and
written. ``grids``: one grid in full, and the smallest that fits. ``request``, ``report``: the
command line and the answer of ``tools/plan_run.py``.
"""

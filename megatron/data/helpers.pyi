"""What helpers.cpp gives Python; the module is there only where it was built."""

import numpy as np

def build_sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, num_samples: int,
                     wide: bool) -> np.ndarray: ...
def build_blending_indices(weights: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...

"""What is killed in test_soak."""

import numpy as np

import jaxckpt


def tree(generation: int, nbytes: int) -> dict[str, np.ndarray | int]:
    """Half of it changes with every generation."""
    count = nbytes // 8
    return {
        "same": np.arange(count, dtype=np.int32),
        "changing": np.arange(count, dtype=np.int32) + generation,
        "step": generation,
    }


def overwrite_until_killed(path: str, generation: int, nbytes: int) -> None:
    while True:
        generation += 1
        jaxckpt.save(path, tree(generation, nbytes), overwrite=True)

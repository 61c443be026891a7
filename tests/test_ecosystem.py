"""Training with each framework, killed at random steps and resumed, ends as if it had not been killed."""

import importlib.util
import os
import random
import signal
from pathlib import Path
from typing import Any

import ecosystem_child
import forked
import pytest

import jaxckpt

SEED = int(os.environ.get("JAXCKPT_SEED", random.SystemRandom().randrange(1 << 30)))
PACKAGE = {"nnx": "flax", "linen": "flax", "equinox": "equinox", "optax": "optax", "keras": "keras"}
KILLS = {"nnx": 10, "linen": 10, "equinox": 10, "optax": 10, "haiku": 10, "keras": 5}
LONGEST_LIFE = 5


def told(target: Any, *args: Any, killed: bool = False) -> list[Any]:
    """All that `target` tells, in a process of its own, until it ends by itself or is killed, as expected."""
    ours, theirs = forked.Pipe()
    process = forked.start(target, theirs, *args)
    theirs.close()
    messages = []
    with ours:
        while ours.poll(120):
            try:
                messages.append(ours.recv())
            except EOFError:
                break
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if killed else 0)
    return messages


@pytest.mark.parametrize("framework", ecosystem_child.FRAMEWORKS)
def test_training_that_is_killed_and_resumed_ends_with_the_same_bits(
    framework: str, tmp_path: Path, long: bool
) -> None:
    package = PACKAGE.get(framework, "jax")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    kills = KILLS[framework] * (5 if long else 1)
    steps = kills * LONGEST_LIFE + 1
    chance = random.Random(f"{SEED} {framework}")
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    (expected,) = told(ecosystem_child.undisturbed, cache, framework, steps)
    begun = []
    for _ in range(kills):
        life = (steps, str(run), chance.randint(1, LONGEST_LIFE), chance.randrange(1 << 30))
        begun += told(ecosystem_child.train, cache, framework, *life, killed=True)
    first, (held, saved) = told(ecosystem_child.train, cache, framework, steps, str(run), 0, 0)
    print(f"seed {SEED}: {framework}, {steps} steps, {kills} kills; each began after step {[*begun, first]}")
    assert begun == sorted(begun)
    assert held == expected
    assert saved == expected
    assert jaxckpt.Checkpointer(run).steps() == [steps - 1, steps]
    assert jaxckpt.verify(run / str(steps)).ok

"""What is killed in test_kills: a process that saves, overwrites and deletes one checkpoint, telling of each before and
after."""

import itertools
import os
import pickle
import random
import socket

import syscalls_child

import jaxckpt
from jaxckpt import PendingSave


def _early_acknowledgement() -> None:
    pending: list[PendingSave] = []

    def save(path: str, generation: int, overwrite: bool) -> None:
        while pending:
            pending.pop().result()
        tree = syscalls_child.tree(generation)
        pending.append(jaxckpt.start_save(path, tree, overwrite=overwrite, options=syscalls_child.OPTIONS))

    syscalls_child.save = save


MUTANTS = syscalls_child.MUTANTS | {"early acknowledgement": _early_acknowledgement}


def loop(channel: socket.socket, warm: str, mutant: str = "") -> None:
    """Warm up, then work on the path that `channel` names, from a generation on, until killed."""
    warm = os.path.join(warm, str(os.getpid()))
    syscalls_child.save(warm, 0, False)
    syscalls_child.delete(warm)
    if mutant:
        MUTANTS[mutant]()
    channel.send(b"ready")
    path, generation, seed = pickle.loads(channel.recv(1 << 16))
    choice = random.Random(seed)
    there = os.path.exists(os.path.join(path, "manifest.json"))
    for number in itertools.count(generation):
        if there and choice.random() < 0.3:
            channel.send(pickle.dumps(("begins", None)))
            syscalls_child.delete(path)
            channel.send(pickle.dumps(("done", None)))
        channel.send(pickle.dumps(("begins", number)))
        syscalls_child.save(path, number, True)
        channel.send(pickle.dumps(("done", number)))
        there = True

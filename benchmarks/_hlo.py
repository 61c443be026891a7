"""Which collectives a compiled program has, and which of them its loops wait for in every iteration."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r" = (.+?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)
_LOOP = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_CALLED = re.compile(r"\w+=\{?((?:%[\w.-]+(?:, )?)+)")


class Collectives(NamedTuple):
    """How often collectives stand in the text of a program; how often they run, it does not tell.

    Args:
        total: All of them.
        in_loops: Those in the body or the condition of a loop, or in what these call.
        of_predicates: Of those the ones that a condition needs: they are in it, or they reduce booleans.
    """

    total: int
    in_loops: int
    of_predicates: int


def collectives(text: str) -> Collectives:
    """Count them in the text of `jax.jit(f).lower(...).compile().as_text()`."""
    program = _computations(text)
    loops = [match.groups() for lines in program.values() for line in lines if (match := _LOOP.search(line))]
    conditions = _reached(program, (condition for condition, _ in loops))
    inside = _reached(program, (name for loop in loops for name in loop))
    found = {
        name: [match[1] for line in lines if (match := _COLLECTIVE.search(line))] for name, lines in program.items()
    }
    return Collectives(
        sum(map(len, found.values())),
        sum(len(found[name]) for name in inside),
        sum(name in conditions or "pred[" in result for name in inside for result in found[name]),
    )


def _computations(text: str) -> dict[str, list[str]]:
    """Name -> its lines."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = found[header[1]] = []
        else:
            lines.append(line)
    return found


def _reached(program: dict[str, list[str]], names: Iterable[str]) -> set[str]:
    """The computations named and all that they call."""
    found: set[str] = set()
    ahead = [*names]
    while ahead:
        name = ahead.pop()
        if name in program and name not in found:
            found.add(name)
            ahead += [
                called.strip(" %") for line in program[name] for m in _CALLED.findall(line) for called in m.split(",")
            ]
    return found

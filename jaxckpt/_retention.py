"""Which steps of a training run are kept, and when a step is due. Pure."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the steps with the best values of a metric.

    Args:
        metric: Its name in the `metrics` of a save. Steps without it, or where it is NaN, are never the best.
        mode: Whether the best value is the smallest or the largest.
        count: How many steps.

    Raises:
        ValueError: A value is out of range.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}; expected 'min' or 'max'")
        if self.count < 1:
            raise ValueError(f"count is {self.count}; expected at least 1")

    def best(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The best steps, the best first; of equal ones the later is better."""
        values = {
            step: found[self.metric]
            for step, found in metrics.items()
            if self.metric in found and not math.isnan(found[self.metric])
        }
        sign = 1 if self.mode == "min" else -1
        return sorted(values, key=lambda step: (sign * values[step], -step))[: self.count]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps are kept: those that any rule keeps, and always the newest. With no rule, all.

    Args:
        keep_last: That many of the newest.
        keep_every: Those that it divides.
        keep_best: See `KeepBest`.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1, or None")

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_every is None and self.keep_best is None

    def kept(self, steps: Iterable[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep of `steps`; `metrics` are those of steps that have some."""
        ordered = sorted(steps)
        if self.keeps_all:
            return set(ordered)
        kept = set(ordered[-1:])
        if self.keep_last is not None:
            kept |= set(ordered[-self.keep_last :])
        if self.keep_every is not None:
            kept |= {step for step in ordered if step % self.keep_every == 0}
        if self.keep_best is not None:
            kept |= set(self.keep_best.best({step: metrics[step] for step in ordered if step in metrics}))
        return kept


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a step is saved. With no rule, each that is passed to `save`.

    Args:
        every_steps: Those that it divides.
        every_seconds: When so long has passed since the last save.
        max_overhead: As often as the measured cost allows: the time that a save takes from
            the training loop is at most this share of the time between saves.
            Source: Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and (not isinstance(self.every_steps, int) or self.every_steps < 1):
            raise ValueError(f"every_steps is {self.every_steps!r}; expected a whole number of at least 1")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ValueError(f"every_seconds is {self.every_seconds!r}; expected more than 0")
        if self.max_overhead is not None and not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead is {self.max_overhead!r}; expected a share between 0 and 1, such as 0.03")

    @property
    def looks_at_time(self) -> bool:
        """Whether processes whose clocks differ could disagree."""
        return self.every_seconds is not None or self.max_overhead is not None

    def is_due(self, step: int, since_seconds: float, cost_seconds: float) -> bool:
        """Whether to save `step`, given the time since the last save began and what a save costs the loop."""
        rules: list[bool] = []
        if self.every_steps is not None:
            rules.append(step % self.every_steps == 0)
        if self.every_seconds is not None:
            rules.append(since_seconds >= self.every_seconds)
        if self.max_overhead is not None:
            rules.append(since_seconds >= cost_seconds / self.max_overhead)
        return any(rules) or not rules


class Cost:
    """What saves cost a training loop, from the times at which it comes by.

    The time between two visits, beyond the median of those without a save in flight, is
    lost to the save. The newest few saves count.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=64)
        self._lost: deque[float] = deque(maxlen=8)
        self._last: float | None = None

    def visit(self, now: float, *, in_flight: bool) -> None:
        """The loop comes by: a step has ended, during which a save was in flight or not."""
        if self._last is not None:
            passed = now - self._last
            if not in_flight:
                self._quiet.append(passed)
            elif self._lost and self._quiet:
                self._lost[-1] += max(0.0, passed - statistics.median(self._quiet))
        self._last = now

    def saved(self, blocked_seconds: float, now: float) -> None:
        """A save has begun and has blocked the loop for so long."""
        self._lost.append(blocked_seconds)
        self._last = now

    @property
    def seconds(self) -> float:
        """What a save costs, in seconds; 0 before the first."""
        return statistics.median(self._lost) if self._lost else 0.0


def young_daly_seconds(cost_seconds: float, mean_seconds_between_failures: float) -> float:
    """The time between saves that loses the least to saving and to failures together.

    Source: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, 2006.
    """
    if cost_seconds < 0 or mean_seconds_between_failures <= 0:
        raise ValueError("expected a cost of at least 0 and a time between failures of more than 0 seconds")
    return math.sqrt(2 * cost_seconds * mean_seconds_between_failures)

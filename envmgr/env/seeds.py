"""Which seed each reset of one env passes on."""

from __future__ import annotations

import operator

import numpy as np


class EpisodeSeeds:
    """The seeds of one env's episodes, for envs that are seeded through `reset(seed=)`.

    The first reset after `begin(seed, dynamic_seed)` uses exactly `seed`. Later ones use none with
    `dynamic_seed` None (the env's generator goes on), one derived from `(seed, episode)` with True,
    and `seed` again with False. A reset that failed and is tried again uses the same seed.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._dynamic_seed: bool | None = None
        self._episode = 0

    def begin(self, seed: int | None, dynamic_seed: bool | None) -> None:
        """Start over with a seed; None clears it.

        Raises:
            TypeError: the seed is not an integer.
            ValueError: it is negative.
        """
        if seed is not None:
            seed = operator.index(seed)
            if seed < 0:
                raise ValueError(f"an env's seed should be 0 or more, it is {seed}")
        self._seed, self._dynamic_seed, self._episode = seed, dynamic_seed, 0

    @property
    def are_used_up(self) -> bool:
        """Whether no reset uses a seed until new ones are given."""
        return self._seed is None or (self._episode > 0 and self._dynamic_seed is None)

    def due(self) -> int | None:
        """Return the seed for the next reset, or None."""
        if self._seed is None or self._episode == 0 or self._dynamic_seed is False:
            return self._seed
        if self._dynamic_seed is None:
            return None
        sequence = np.random.SeedSequence((self._seed, self._episode))
        return int(sequence.generate_state(1)[0])

    def reset_done(self) -> None:
        """Note that a reset with the seed that was due has succeeded."""
        self._episode += 1

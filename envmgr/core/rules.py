"""What the supervisor has to know of episodes and observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envmgr.wire.arenas import CopyOnGet


@dataclass
class EpisodeRules:
    """Rules of episodes.

    Attributes:
        episode_num: episodes per env before DONE; may be inf.
        auto_reset: an ended env is reset at once.
        reset_inplace: the timestep that ends an episode waits for that reset.
        copy_on_get: whether observations are copied out of shared memory, as in the config.
        check_actions: as in the config.
        raise_non_finite: NaN or infinite values end the manager rather than the episode.
        dynamic_seed: as in `BaseEnv.seed`; goes with each explicit seed.
        spare_takers: whether an env is built as spares are, by env_id; empty: all are.
        spares_in_order: see `Spares`.
    """

    episode_num: float = float("inf")
    auto_reset: bool = True
    reset_inplace: bool = False
    copy_on_get: CopyOnGet = True
    check_actions: Literal[True, False, "strict"] = True
    raise_non_finite: bool = False
    dynamic_seed: bool | None = None
    spare_takers: tuple[bool, ...] = ()
    spares_in_order: bool = True

"""Checks of keys of a manager's config that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envmgr.config.checks import show_value
from envmgr.errors import ConfigError

if TYPE_CHECKING:  # it has itself checked
    from envmgr.config.manager import ManagerConfig


def check_spares(config: ManagerConfig) -> None:
    """Refuse spares where they cannot take anybody's place.

    Raises:
        ConfigError: they cannot.
    """
    keeps = f"manager.spare_env_num is {config.spare_env_num}, but "
    if not config.auto_reset:
        raise ConfigError(
            f"{keeps}manager.auto_reset is false, and spares stand in for automatic resets. "
            "Leave it 0, or turn auto_reset on."
        )
    workers = config.num_workers
    own = workers is None or (workers != "auto" and config.env_num in (None, workers))
    if not own:
        raise ConfigError(
            f"{keeps}manager.num_workers is {workers}, and a spare can only take the place of "
            "an env that has its worker to itself. Leave one of the two out."
        )


def check_resuming(config: ManagerConfig) -> None:
    """Refuse `resume` where nothing could be resumed.

    Raises:
        ConfigError: nothing could.
    """
    resumes = config.on_failure == "resume"
    if resumes != (config.snapshot_every is not None):
        raise ConfigError(
            f"manager.on_failure is {config.on_failure} and manager.snapshot_every is "
            f"{show_value(config.snapshot_every)}, but envs are saved to be resumed, and "
            "resumed from what was saved. Set both (on_failure: resume and a number of "
            "steps), or neither."
        )
    if resumes and (not config.auto_reset or config.spare_env_num):
        raise ConfigError(
            f"manager.on_failure is resume while manager.auto_reset is "
            f"{show_value(config.auto_reset)} and manager.spare_env_num {config.spare_env_num}, "
            "but an env that is resumed takes the place of an automatic reset, and of a "
            "spare. Turn auto_reset on and leave spares out, or use on_failure: recover."
        )

"""envmgr's managers as kinds of DI-engine, for its configs, collectors, evaluators and middleware.

Importing this module registers them in DI-engine's own registry, under names of their own, so that
a DI-engine config can select one:

    env_manager=dict(type="envmgr_subprocess", import_names=["envmgr.adapters.ding"])

The classes have the same names as DI-engine's, for scripts that import the classes. `take_over()`
replaces DI-engine's own kinds by these, for configs that should stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import Never

from envmgr import managers
from envmgr.adapters.ding_timesteps import CompletedDicts, CompletedTrees, Ends
from envmgr.adapters.on_failure import raise_in_trainer
from envmgr.config import EasyDict
from envmgr.env.gym_spaces import own_space
from envmgr.errors import EnvFailure, EnvManagerError, ManagerClosedError, StateError
from envmgr.manager import EnvManager
from envmgr.optional_packages import missing
from envmgr.seeding import seeds_by_env
from envmgr.types import EnvFactory
from envmgr.views import DictView, TreeView

try:
    from ding.envs import BaseEnvManager as DingsManager
    from ding.utils import ENV_MANAGER_REGISTRY as DINGS_REGISTRY
    from gym import spaces as gym_spaces
except ImportError as error:
    raise missing(
        "envmgr.adapters.ding needs DI-engine>=0.5.3", error, package="DI-engine>=0.5.3"
    ) from error

_OF_THE_REGISTRY = ("type", "import_names")
"""Keys that say which class to build, and mean nothing to the class itself."""


class ClosedError(ManagerClosedError, AssertionError):
    """The manager is closed. Also an AssertionError, which DI-engine's managers raise."""


class LaunchedError(StateError, AssertionError):
    """The manager is launched already. Also an AssertionError, which DI-engine's managers raise."""


class DingKind(EnvManager):
    """The additional behaviour of envmgr's kinds in DI-engine.

    - At the end of an episode, the info has `eval_episode_return`: the sum of the rewards, unless
      the env itself gives it. The `error` of an abnormal timestep is text; `env_failures` has the
      exception.
    - Spaces belong to the package that the envs' own spaces belong to, gym or gymnasium.
    - Actions reach the envs as they are, unless the config has `check_actions`.
    - Where envs run in processes, `connect_timeout` also limits resets, unless the config has
      `reset_timeout`.
    - A closed manager raises an `AssertionError`. With `on_failure: raise`, a builtin exception of
      an env's code is raised as such.

    Args:
        env_fn: one factory for each env.
        cfg: the manager's config. Any `type` in it is ignored: the class decides.
        **spaces: see `EnvManager`.
    """

    _closed_error = ClosedError

    def __init__(
        self, env_fn: Sequence[EnvFactory], cfg: Mapping[str, Any] | None = None, **spaces: Any
    ) -> None:
        self._ends = Ends()
        self._shown_spaces: dict[str, Any] = {}
        self._space_seed: int | None = None
        own = {key: value for key, value in (cfg or {}).items() if key not in _OF_THE_REGISTRY}
        in_processes = isinstance(self, managers.AsyncSubprocessEnvManager)
        if in_processes and own.get("reset_timeout") is None:
            own["reset_timeout"] = own.get("connect_timeout", self.default_config().connect_timeout)
        super().__init__(env_fn, own, **spaces)

    def _make_view(self) -> DictView:
        has_trees = isinstance(super()._make_view(), TreeView)
        return CompletedTrees(self._ends) if has_trees else CompletedDicts(self._ends)

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return every key with its default, and DI-engine's `cfg_type`."""
        config = super().default_config()
        config.cfg_type = f"{cls.__name__}Dict"
        return config

    @property
    def env_failures(self) -> dict[int, EnvFailure]:
        """The latest failure since the launch of each env that has failed, by env_id."""
        return dict(self._ends.failures)

    @property
    def _episode_num(self) -> Any:  # which DI-engine's parallel collectors read
        return self.cfg.episode_num

    # -- spaces -----------------------------------------------------------------------------

    @property
    def observation_space(self) -> Any:
        """The observation space of one env; from gym or gymnasium, like the env's own."""
        return self._shown("observation_space", super().observation_space)

    @property
    def action_space(self) -> Any:
        """The action space of one env; from gym or gymnasium, like the env's own."""
        return self._shown("action_space", super().action_space)

    @property
    def reward_space(self) -> Any:
        """The reward space of one env, or None; from gym or gymnasium, like the env's own."""
        return self._shown("reward_space", super().reward_space)

    def _shown(self, name: str, space: Any) -> Any:
        if name not in self._shown_spaces:
            self._shown_spaces[name] = own_space(space, gym_spaces)
            self._seed_shown_space()
        return self._shown_spaces[name]

    def seed(self, seed: Any, dynamic_seed: bool | None = None) -> None:
        """Seed the envs; see `EnvManager.seed`. The seed of env 0 also seeds `action_space`."""
        super().seed(seed, dynamic_seed)
        self._space_seed = seeds_by_env(seed, self.env_num).get(0)
        self._seed_shown_space()

    def _seed_shown_space(self) -> None:
        space = self._shown_spaces.get("action_space")
        if space is not None and self._space_seed is not None:
            space.seed(self._space_seed)
            self._space_seed = None

    # -- calls ------------------------------------------------------------------------------

    def launch(
        self,
        reset_param: Mapping[int, Mapping[str, Any] | None] | None = None,
        **others: Never,
    ) -> None:
        """Launch all envs; see `EnvManager.launch`."""
        if not self.closed:
            raise LaunchedError("the manager is launched already; close() it first")
        self._ends.forget(range(self.env_num), failures=True)
        try:
            super().launch(reset_param, **others)
        except EnvManagerError as error:
            self._raise_in_trainer(error)
            raise

    def reset(
        self,
        reset_param: Mapping[int, Mapping[str, Any] | None] | None = None,
        **others: Never,
    ) -> None:
        """Reset envs and wait until they are reset; see `EnvManager.reset`."""
        self._refuse_unless_launched()  # before the arguments are looked at
        super().reset(reset_param, **others)

    # There is no `step` here, so that Ctrl-C loses nothing that the manager's `step` has delivered.

    def _surface(self, supervisor: Any) -> None:
        try:
            super()._surface(supervisor)
        except EnvManagerError as error:
            self._raise_in_trainer(error)
            raise

    def _begin_resets(self, supervisor: Any, params: Mapping[int, dict[str, Any] | None]) -> None:
        super()._begin_resets(supervisor, params)
        self._ends.forget(params)  # here, where Ctrl-C does not come between the two

    def _raise_in_trainer(self, error: EnvManagerError) -> None:
        if self.cfg.on_failure == "raise":
            raise_in_trainer(error)


def _preset(kind: type[EnvManager], key: str, **further: Any) -> dict[str, Any]:
    return {**kind.preset, "type": key, "check_actions": False, **further}


# DI-engine's class is a base for isinstance only. It comes last, so that everything public is found
# in the bases before it.
class BaseEnvManager(DingKind, managers.BaseEnvManager, DingsManager):  # type: ignore[misc]
    """`envmgr_base`: as envmgr's `base`."""

    preset: ClassVar[Mapping[str, Any]] = _preset(managers.BaseEnvManager, "envmgr_base")


class BaseEnvManagerV2(DingKind, managers.BaseEnvManagerV2, DingsManager):  # type: ignore[misc]
    """`envmgr_base_v2`: as envmgr's `base_v2`."""

    preset: ClassVar[Mapping[str, Any]] = _preset(managers.BaseEnvManagerV2, "envmgr_base_v2")


class SyncSubprocessEnvManager(
    DingKind,
    managers.SyncSubprocessEnvManager,
    DingsManager,  # type: ignore[misc]
):
    """`envmgr_subprocess`: as envmgr's `subprocess`."""

    preset: ClassVar[Mapping[str, Any]] = _preset(
        managers.SyncSubprocessEnvManager, "envmgr_subprocess"
    )


class SubprocessEnvManagerV2(
    DingKind,
    managers.SubprocessEnvManagerV2,
    DingsManager,  # type: ignore[misc]
):
    """`envmgr_subprocess_v2`: as envmgr's `subprocess_v2`."""

    preset: ClassVar[Mapping[str, Any]] = _preset(
        managers.SubprocessEnvManagerV2, "envmgr_subprocess_v2"
    )


class AsyncSubprocessEnvManager(
    DingKind,
    managers.AsyncSubprocessEnvManager,
    DingsManager,  # type: ignore[misc]
):
    """`envmgr_async_subprocess`: as envmgr's `async_subprocess`, waiting 10 ms for stragglers."""

    preset: ClassVar[Mapping[str, Any]] = _preset(
        managers.AsyncSubprocessEnvManager, "envmgr_async_subprocess", step_wait_timeout=0.01
    )


class AsyncSubprocessEnvManagerV2(
    DingKind,
    managers.AsyncSubprocessEnvManagerV2,
    DingsManager,  # type: ignore[misc]
):
    """`envmgr_async_subprocess_v2`: as `envmgr_async_subprocess`, with treetensors."""

    preset: ClassVar[Mapping[str, Any]] = _preset(
        managers.AsyncSubprocessEnvManagerV2, "envmgr_async_subprocess_v2", step_wait_timeout=0.01
    )


KINDS: dict[str, type[DingKind]] = {
    kind.preset["type"]: kind
    for kind in (
        BaseEnvManager,
        BaseEnvManagerV2,
        SyncSubprocessEnvManager,
        SubprocessEnvManagerV2,
        AsyncSubprocessEnvManager,
        AsyncSubprocessEnvManagerV2,
    )
}
"""The kinds by their keys in DI-engine's registry."""

for _key, _kind in KINDS.items():
    DINGS_REGISTRY.register(_key, _kind, force_overwrite=True)


def take_over() -> None:
    """Replace DI-engine's own kinds by those of the same name here: `subprocess` and so on."""
    for key, kind in KINDS.items():
        theirs = key.removeprefix("envmgr_")
        if theirs in DINGS_REGISTRY:
            DINGS_REGISTRY.register(theirs, kind, force_overwrite=True)

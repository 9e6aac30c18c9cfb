"""Calls, attributes, pictures and replays of the envs of a manager."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.core import Phase, Supervisor, validate
from envmgr.core.launching import replay_payloads
from envmgr.core.submit import submit_calls
from envmgr.errors import (
    ConfigError,
    EnvAttributeError,
    EnvFailure,
    EnvProtocolError,
    ManagerClosedError,
    MethodAccessError,
    StateError,
)
from envmgr.manager.engine_owner import Called
from envmgr.manager.lifetime import ManagerLifetime
from envmgr.normalizing import Normalization
from envmgr.types import EnvIds, monotonic
from envmgr.wire.messages import Attribute, Op, RemoteFailure
from envmgr.worker.applied import EnvFunction


class EnvAccess(ManagerLifetime):
    """Reaches the envs themselves, past stepping and resetting; see `EnvManager`."""

    # -- calls and attributes ---------------------------------------------------------------

    @property
    def generations(self) -> list[int]:
        """How often each env was built anew, by env_id; empty before `launch` and after `close`."""
        engine = self._engine
        return [] if engine is None else [env.generation for env in engine.supervisor.envs]

    def call(
        self, name: str, *args: Any, env_ids: int | EnvIds | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of envs and return the results, in the order of `env_ids`.

        Waits for resets and repairs of these envs first. `reset_timeout` applies.

        Args:
            name: of the method; `reset`, `step`, `seed` and `close` are refused.
            *args: for it.
            env_ids: which envs; None for all.
            **kwargs: for the method.

        Raises:
            MethodAccessError: refused.
            EnvNotReadyError: an env has an action under way.
            EnvFailure: what the first env that failed failed with; its episode goes on if it only
                raised.
        """
        # No `call_async`: Ctrl-C would leave one under way, of a user who has not made it.
        ids, payload = self._call_of(name, args, env_ids, kwargs)
        with self._calling() as supervisor:
            return self._request(supervisor, ids, Op.CALL, [payload] * len(ids), f"call({name!r})")

    def call_async(
        self, name: str, *args: Any, env_ids: int | EnvIds | None = None, **kwargs: Any
    ) -> None:
        """Begin a `call`; `call_wait` returns its results."""
        ids, payload = self._call_of(name, args, env_ids, kwargs)
        with self._calling() as supervisor:
            self._submit(supervisor, ids, Op.CALL, [payload] * len(ids), f"call({name!r})")
            self._called = Called(ids)

    def _call_of(
        self, name: str, args: Any, env_ids: int | EnvIds | None, kwargs: Any
    ) -> tuple[list[int], Any]:
        """Return whom a call goes to, and what is sent to each of them."""
        name = validate.checked_method(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        return ids, (name, args, kwargs) if kwargs else (name, args)

    @property
    def call_is_pending(self) -> bool:
        """Whether a `call_async` is under way, so that `call_wait` comes next."""
        return self._called is not None

    def call_wait(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results of the last `call_async`.

        Args:
            timeout_s: raise TimeoutError after so many seconds; the call goes on.
        """
        called = self._called
        if called is None:
            raise StateError("there is no call under way: use call_async first")
        limit_s = validate.checked_seconds(timeout_s)
        deadline = monotonic() + limit_s
        with self._running.calling as supervisor:
            if not self._await_results(supervisor, called.env_ids, deadline):
                raise TimeoutError(f"the call has not ended after {limit_s:g} s")
            if called.results is None:  # else this was interrupted after they were taken
                called.results = [supervisor.envs[i].result for i in called.env_ids]
            supervisor.forget_results(called.env_ids)
        results = called.results
        self._called = None  # the last that is done: from now on they are delivered
        return _or_raised(results)

    def apply(
        self,
        function: Callable[..., Any],
        *args: Any,
        env_ids: int | EnvIds | None = None,
    ) -> list[Any]:
        """Run a function on envs, where they are, and return the results in the order of `env_ids`.

        For what no method of the envs tells: whether they are wrapped in something, say. What the
        function does to an env is its own business: the manager does not hear of steps and resets
        that it takes, and does not repeat it on envs that are renewed. Waits as `call` does.

        Args:
            function: called with the env, as its factory built it, and `args`. Workers import the
                module that it is from; functions of a script and lambdas are sent whole.
            *args: for it.
            env_ids: which envs; None for all.

        Raises:
            ConfigError: it is no function.
            ActionError: it, or what it is given, cannot be sent.
            EnvNotReadyError, EnvFailure: as `call`.
        """
        if not callable(function):
            raise ConfigError(f"apply takes a function, found a {type(function).__name__}")
        ids = validate.checked_env_ids(env_ids, self.env_num)
        payloads = [(EnvFunction(function, args), ())] * len(ids)
        with self._calling() as supervisor:
            return self._request(supervisor, ids, Op.APPLY, payloads, "apply")

    def get_attr(self, name: str, env_ids: int | EnvIds | None = None) -> list[Any]:
        """Return an attribute of envs, in the order of `env_ids` (None for all).

        Raises:
            EnvAttributeError: an env has none of this name.
            MethodAccessError: it is a method; use `call`.
            EnvNotReadyError: an env has an action under way.
        """
        name = validate.checked_attribute(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        with self._calling() as supervisor:
            what = f"reading {name!r}"
            values = self._request(supervisor, ids, Op.GET_ATTR, [name] * len(ids), what)
        for env_id, value in zip(ids, values, strict=True):
            if isinstance(value, RemoteFailure):
                raise EnvAttributeError(f"env {env_id} has no attribute {name!r}: {value.message}")
            if not isinstance(value, Attribute):
                raise EnvProtocolError(
                    f"the host of env {env_id} answered the reading of {name!r} with a "
                    f"{type(value).__name__}, which is no attribute; do not write into the "
                    "connection of a worker",
                    env_id=env_id,
                    during="call",
                )
            if value.is_method:
                raise MethodAccessError(
                    f"{name!r} is a method of env {env_id}: use manager.call({name!r}, ...)"
                )
        return [value.value for value in values]

    def set_attr(self, name: str, value: Any, env_ids: int | EnvIds | None = None) -> None:
        """Set an attribute of envs; repeated on envs that are renewed later.

        One value for all envs is set in the spares, too. Envs whose attributes were set otherwise
        take no spare.

        Args:
            name: of the attribute.
            value: one value for all, or a list with one for each of `env_ids`.
            env_ids: which envs; None for all.
        """
        name = validate.checked_attribute(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        values = validate.values_for_each(name, value, len(ids))
        if isinstance(value, list):
            payloads = [(name, one) for one in values]
        else:  # one object, which shows that it is the same for all
            payloads = [(name, value)] * len(ids)
        self._request_for_good(ids, Op.SET_ATTR, payloads, f"setting {name!r}")

    def __getattr__(self, name: str) -> list[Any]:
        """Return the attribute `name` of every env, as DI-engine's managers do."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if not self.__dict__.get("_launched", False):
            raise EnvAttributeError(
                f"{type(self).__name__} has no attribute {name!r}; if it is one of the envs, it "
                "can be read after launch()"
            )
        return self.get_attr(name)

    def _request(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> list[Any]:
        self._submit(supervisor, ids, op, payloads, what)
        return self._results_of(supervisor, ids)

    def _request_for_good(self, ids: list[int], op: Op, payloads: list[Any], what: str) -> None:
        """Have envs do something, and those that take their places later."""
        with self._calling() as supervisor:
            self._request(supervisor, ids, op, payloads, what)
            repeat = functools.partial(supervisor.repeat, ids, op, payloads)
            self._running.uninterrupted(repeat)

    def _results_of(self, supervisor: Supervisor, ids: list[int]) -> list[Any]:
        """Wait for results without a limit and return them, or raise the first failure."""
        self._await_results(supervisor, ids, math.inf)
        results = [supervisor.envs[i].result for i in ids]
        supervisor.forget_results(ids)
        return _or_raised(results)

    def _submit(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> None:
        validate.refuse_while_pending(supervisor.table, ids, what)
        repair, envs = supervisor.repair, [supervisor.envs[i] for i in ids]

        def settled() -> bool:
            if repair.fatal is not None or any(env.is_gone for env in envs):
                return True
            return all(env.is_callable for env in envs)

        self._running.wait_until(settled, doing=what)
        self._surface(supervisor)
        validate.refuse_gone(supervisor.table, ids, what)
        submit = functools.partial(submit_calls, supervisor.hosts, envs, op, payloads, what)
        self._running.uninterrupted(submit)

    def _await_results(self, supervisor: Supervisor, ids: list[int], deadline: float) -> bool:
        envs = [supervisor.envs[i] for i in ids]
        return self._running.wait_until(
            lambda: all(env.phase is not Phase.CALLING for env in envs),
            deadline=deadline,
            doing="a call",
        )

    # -- what is handed out -----------------------------------------------------------------

    @property
    def normalization(self) -> Normalization | Any:
        """The running statistics of `normalize_obs`, `normalize_reward` and `episode_statistics`.

        None where none of these is on. (Who has set them knows; so the type does not say it.)
        """
        return self._normalization

    def random_action(self) -> dict[int, Any]:
        """Return a random action for each ready env, from a seeded stream of each env.

        Does not wait: `{}` if none is ready, as when all of them are being reset.
        """
        samplers = self._samplers
        if samplers is None:
            raise ManagerClosedError("the manager is closed; call launch() first")
        return {i: samplers.sample(i, self._newest(i)) for i in self.ready_obs_id}

    # -- pictures, replays, rewards ---------------------------------------------------------

    def render(
        self, env_ids: int | EnvIds | None = None, mode: str | None = None
    ) -> dict[int, Any]:
        """Return what each of `env_ids` (None for all) renders, by env_id.

        Args:
            env_ids: which envs.
            mode: such as "rgb_array"; None for the mode the env was built with.

        Returns:
            In mode "rgb_array" frames `(height, width, 3)` of uint8, in "rgb_array_list" lists of
            those since the last time, in "ansi" texts.
        """
        ids = validate.checked_env_ids(env_ids, self.env_num)
        frames = self.call("render", validate.checked_mode(mode), env_ids=ids)
        return dict(zip(ids, frames, strict=True))

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """What each ready env renders, by env_id; `envmgr.env.tile_images` makes one image of it.

        As `render`, in the mode that env 0 was built with, or "rgb_array" if it says none.

        Raises:
            ConfigError: the envs were built to show windows ("human"), which are no images.
        """
        mode = self.render_mode
        if mode == "human":
            raise ConfigError(
                "env 0 was built with render_mode='human', which shows a window and gives no "
                "image. Build the envs with render_mode='rgb_array' (YAML: "
                "env.kwargs.render_mode: rgb_array)"
            )
        return self.render(self.ready_env, mode=mode if isinstance(mode, str) else "rgb_array")

    def enable_save_replay(self, replay_path: str | Sequence[str]) -> None:
        """Have every env save a replay of each episode that begins from now on.

        Gymnasium envs and vector envs, built with a render mode that gives frames, save videos
        `<folder>/env_<env_id>-episode_<number>.mp4`; others what they save themselves.

        Args:
            replay_path: a folder for all envs, or one for each.

        Raises:
            EnvFailure: an env cannot: it gives no frames, PyAV (extra `video`) is not installed.
        """
        paths = validate.checked_folders(replay_path, self.env_num, "replay_path")
        before, self._replay_paths = self._replay_paths, paths
        if self._launched:
            ids, payloads = list(range(self.env_num)), replay_payloads(paths)
            try:
                self._request_for_good(ids, Op.CALL, payloads, "enable_save_replay")
            except StateError:  # it was refused, and nothing is saved there
                self._replay_paths = before
                raise

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Have one env, and those that are renewed in its place, save figures in a folder.

        Gymnasium envs and vector envs save the last frame of each episode as a PNG file. With
        spares, such an env takes none.

        Raises:
            EnvFailure: the env cannot.
        """
        folder = validate.checked_folder(figure_path, "figure_path")
        env_id = validate.checked_env_id(env_id, self.env_num)
        name = "enable_save_figure"
        self._request_for_good([env_id], Op.CALL, [(name, (folder,))], name)

    def reward_shaping(self, env_id: int, transitions: list[Any]) -> Any:
        """Return the transitions of one env's episode with their rewards shaped by the env."""
        transitions = validate.checked_transitions(transitions)
        env_id = validate.checked_env_id(env_id, self.env_num)
        return self.call("reward_shaping", transitions, env_ids=env_id)[0]


def _or_raised(results: list[Any]) -> list[Any]:
    """Return the results of a call; raise the first of them that is a failure."""
    for result in results:
        if isinstance(result, EnvFailure):
            raise result
    return results

"""A manager as the `environment_factory` of TRL's trainers.

TRL makes an object for each rollout, resets it for each of its tasks, hands its public methods to
the model as tools, and never closes it. Here such an object leases an env from its reset until its
reward is known.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from envmgr.adapters.method_calls import Answer, MethodCall, ToolEnv, signature_with_self
from envmgr.errors import ConfigError, EnvFailure, EnvManagerError, EnvNotReadyError
from envmgr.manager import EnvManager
from envmgr.manager.leases import Lease, Slot
from envmgr.outcomes import Outcome, failure_in

__all__ = ["as_trl", "tool_env"]

_RESERVED = frozenset({"get_reward", "outcome", "reset"})
"""The public members that objects for TRL have besides tools."""


def tool_env(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a factory for a manager of envs whose actions are calls of their methods.

    `make(tool_env(Terminal), env_num=64)` is a manager for `as_trl`.

    Args:
        build: returns the env: an object such as TRL expects of an `environment_factory`, with
            `reset(**row)`, methods that are tools, and perhaps `get_reward()` and `close()`.
    """
    if not callable(build):
        raise ConfigError(
            f"tool_env should be given a class or a function that gives an env, not {build!r}"
        )
    return functools.partial(ToolEnv, build)


def as_trl(
    manager: EnvManager | Callable[[], EnvManager],
    tools: Sequence[Callable[..., Any]],
    *,
    acquire_timeout_s: float | None = 600.0,
    episode_timeout_s: float | None = None,
) -> Callable[[], Any]:
    """Return an `environment_factory` for TRL's trainers, whose envs are those of a manager.

    The objects that it returns have the methods `reset` and `get_reward`, and the tools. A tool
    runs in the env's worker, under `step_timeout`. An exception that it raises is raised in the
    trainer, which tells the model. If the env crashes or hangs, `get_reward` returns None, and TRL
    leaves the rollout out.

    Args:
        manager: a manager of envs that `tool_env` made; if it is not launched, the first reset does
            that. Or a function without arguments that returns such a manager, for trainers that run
            rollouts in another process (`AsyncGRPOTrainer`).
        tools: methods of the env's class, with annotations and docstrings as TRL needs them.
        acquire_timeout_s: seconds that a reset waits for a free env; None: for ever.
        episode_timeout_s: the limit of a rollout in seconds, from its reset.

    Raises:
        ConfigError: an argument does not fit; the message says what is wrong.
    """
    if not isinstance(manager, EnvManager) and not callable(manager):
        raise ConfigError(
            "as_trl should be given a manager, or a function that gives one, it was given "
            f"{manager!r}"
        )
    checked = _checked(tools)
    if isinstance(manager, EnvManager):
        _refuse_others(manager, checked)
    return _Factory(manager, checked, acquire_timeout_s, episode_timeout_s)


def _checked(tools: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return the tools, if TRL can use them.

    Raises:
        ConfigError: TRL cannot use them.
    """
    functions = list(tools) if isinstance(tools, (list, tuple)) else []
    if not functions:
        raise ConfigError(
            f"tools should be a list of methods of the env's class, such as [Terminal.run], found "
            f"{tools!r}"
        )
    names = []
    for tool in functions:
        name = getattr(tool, "__name__", None)
        if not inspect.isfunction(tool) or name is None:
            raise ConfigError(
                f"tools should be methods of the env's class, such as [Terminal.run], and one is "
                f"{tool!r}"
            )
        if name.startswith("_") or name in _RESERVED or name in names:
            raise ConfigError(
                f"{name} cannot be a tool: a tool is a public method, given once, and "
                f"{', '.join(sorted(_RESERVED))} are none"
            )
        bare = [
            parameter.name
            for parameter in inspect.signature(tool).parameters.values()
            if parameter.name != "self" and parameter.annotation is inspect.Parameter.empty
        ]
        if bare or not inspect.getdoc(tool):
            lacks = f"no annotation of {', '.join(bare)}" if bare else "no docstring"
            raise ConfigError(
                f"the tool {name} has {lacks}: TRL tells the model of a tool by its annotations "
                "and its docstring, with a section Args"
            )
        names.append(name)
    return functions


def _refuse_others(manager: EnvManager, tools: Sequence[Callable[..., Any]]) -> None:
    """Refuse a manager whose envs cannot be called, or lack a tool.

    Raises:
        ConfigError: its envs cannot be called, or lack a tool.
    """
    for build in manager._env_fn:
        if not isinstance(build, functools.partial) or build.func is not ToolEnv:
            raise ConfigError(
                f"the envs of {manager!r} take actions and no calls of tools: make the manager of "
                "tool_env(Terminal), where Terminal is the env's class"
            )
        called = build.args[0]
        lacking = [tool.__name__ for tool in tools if not hasattr(called, tool.__name__)]
        if inspect.isclass(called) and lacking:
            raise ConfigError(
                f"{called.__name__} has no method {', '.join(lacking)}: give methods of the class "
                "that the manager was made of"
            )


class _Factory:
    """The factory that `as_trl` returns, which makes the objects that TRL wants."""

    def __init__(
        self,
        source: EnvManager | Callable[[], EnvManager],
        tools: Sequence[Callable[..., Any]],
        acquire_s: float | None,
        episode_s: float | None,
    ) -> None:
        self._source = source
        self._tools = tools
        self._limits = (acquire_s, episode_s)
        self._lock = threading.Lock()
        self._manager: EnvManager | None = None  # until it is launched
        self._class = _class_of(tools, self)

    def __call__(self) -> Any:
        """Return an object for one rollout after another."""
        return self._class()

    def lease(self) -> Lease:
        """Return a lease of one env; launch the manager if it is not launched."""
        acquire_s, episode_s = self._limits
        with self._lock:
            if self._manager is None:
                source = self._source
                manager = source if isinstance(source, EnvManager) else source()
                _refuse_others(manager, self._tools)
                if manager.closed:
                    manager.launch()
                self._manager = manager
        return self._manager.lease(acquire_timeout_s=acquire_s, episode_timeout_s=episode_s)

    def __reduce__(self) -> Any:
        """Pickle the factory for another process, which makes a manager of its own."""
        if isinstance(self._source, EnvManager):
            raise ConfigError(
                "this trainer runs its rollouts in another process, and a manager cannot go there: "
                "give as_trl a function that makes it, as a module's function or a "
                "functools.partial of one"
            )
        return _Factory, (self._source, self._tools, *self._limits)


class _Rollout:
    """An env that is leased for one rollout after another; its public members are for TRL."""

    _factory: ClassVar[_Factory]

    def __init__(self) -> None:
        self._calling = threading.Lock()
        self._lease: Lease | None = None  # gives the env back when this object is collected
        self._slot: Slot | None = None
        self._outcome: Outcome | None = None
        self._reward: Any = None

    @property
    def outcome(self) -> Outcome | None:
        """What has become of the rollout; None while it runs."""
        return self._outcome

    def reset(self, **row: Any) -> Any:
        """Begin a rollout with a fresh env.

        Args:
            **row: a row of the data set.

        Returns:
            What the env's reset returned: None, or what TRL adds to the prompt. Also None if the
            reset failed: the rollout has no reward then.
        """
        with self._calling:
            self._leave()
            self._outcome = self._reward = None
            lease = self._factory.lease()
            self._lease, self._slot = lease, lease.__enter__()
            try:
                answer = self._slot.reset(options={"call": MethodCall("reset", (), row)})[0]
            except EnvFailure:
                self._end(self._slot.outcome)
                return None
            return answer.result()

    def get_reward(self) -> Any:
        """End the rollout.

        Returns:
            What the env's `get_reward` returns; None if it has no such method, or if the env has
            failed in this rollout.
        """
        with self._calling:
            if self._slot is not None:
                answer = None
                with suppress(EnvManagerError):
                    answer = self._step(MethodCall("get_reward", ends=True))
                if self._slot is not None:
                    self._end(self._slot.episode_outcome)
                if answer is not None:
                    self._reward = answer.result()
            return self._reward

    def _tool(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a tool in the env's worker; return what it returns, raise what it raises."""
        with self._calling:
            return self._step(MethodCall(name, args, kwargs)).result()

    def _step(self, call: MethodCall) -> Answer:
        slot = self._slot
        if slot is None:
            raise EnvNotReadyError(
                "the environment of this rollout has failed, or was not reset yet: no tool can be "
                "called until the next reset"
            )
        timestep = slot.step(call)
        failure = failure_in(timestep.info)
        if failure is not None:
            self._end(slot.episode_outcome)
            raise failure
        answer: Answer = timestep.obs
        return answer

    def _end(self, outcome: Outcome | None) -> None:
        """Keep the outcome of the rollout, and give the env back."""
        self._outcome = outcome
        self._leave()

    def _leave(self) -> None:
        lease, self._lease, self._slot = self._lease, None, None
        if lease is not None:
            lease.__exit__(None, None, None)


def _class_of(tools: Sequence[Callable[..., Any]], factory: _Factory) -> type[_Rollout]:
    """Return the class of the objects for TRL, which has the tools as methods.

    TRL names the column of rewards after this class.
    """
    members: dict[str, Any] = {tool.__name__: _method_of(tool) for tool in tools}
    name = tools[0].__qualname__.rpartition(".")[0].rpartition(".")[2] or "Environment"
    return type(name, (_Rollout,), {**members, "_factory": factory})


def _method_of(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with a tool's name, annotations and docstring, which calls the tool."""

    @functools.wraps(tool)
    def method(self: _Rollout, *args: Any, **kwargs: Any) -> Any:
        return self._tool(tool.__name__, args, kwargs)

    if next(iter(inspect.signature(tool).parameters), None) != "self":  # a static one
        method.__signature__ = signature_with_self(tool)  # type: ignore[attr-defined]
    return method

"""The whole state of an env as bytes, to be put back into it or into one built the same way.

An env consists of layers: the object that the factory built, and the envs that it wraps. The first
layer from the outside that has one of the method pairs in `PAIRS`, usually the innermost, gives its
state itself. If no layer has one, the attributes of the innermost are copied, if that is allowed.
Of the layers around it, the attributes are copied, such as the counter of a `TimeLimit` or the
frames of a stack. The layers remain the same objects; only what they hold is replaced. How an env
renders, and what is recorded of it, is not state: an env keeps what it was built with.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from gymnasium.utils import EzPickle

from envmgr import pickles
from envmgr.env.agents import AgentsEnv
from envmgr.env.batched import BatchRow
from envmgr.env.contract import env_name, takes
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.old_gym import OldGymEnv
from envmgr.env.pictures import is_filmed
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text

PAIRS = (
    ("get_state", "set_state"),
    ("clone_full_state", "restore_full_state"),  # of gym's Atari envs: with the generator
    ("clone_state", "restore_state"),  # of ALE's
)
"""Pairs of methods by which an env gives and takes its state; the first that it has is used."""

_WITH_A_PAIR = ("_np_random", "_np_random_seed", "action_space")
"""Attributes of a gymnasium env that are copied besides what its pair of methods covers."""

_CHOSEN: dict[type, tuple[str, ...]] = {
    GymnasiumEnv: ("reset_info", "action_space", "_seeds"),
    OldGymEnv: (),
    AgentsEnv: (*_WITH_A_PAIR, "living", "_actions", "_shown"),
}
"""Attributes of envmgr's own layers that are state; of other layers, all attributes are."""


class NoStateError(TypeError):
    """The state of an env cannot be taken, or is not that of this env; it says what is missing."""


class _Body(NamedTuple):
    """The pickled part: the attributes of the layers, and the state that one layer gave itself."""

    attributes: Sequence[dict[str, Any]]
    given: Any


class _Layers:
    """The layers of an env.

    Args:
        env: the env, in the form that `adapt` runs.

    Attributes:
        copied: the layers whose attributes are state, outermost first.
        source: the layer that gives its state itself; None if no layer does.
        pair: the names of the two methods by which the source does so; None without a source.
        chain: all layers, outermost first.
    """

    def __init__(self, env: Any) -> None:
        self.copied: list[Any] = []
        self.source: Any = None
        self.pair: tuple[str, str] | None = None
        self.chain: list[Any] = []
        layer = env
        while layer is not None and all(layer is not other for other in self.chain):
            self.chain.append(layer)
            if self.source is None:
                kind: Any = type(layer)
                self.pair = _pair_of(kind)
                if self.pair is None:
                    self.copied.append(layer)
                else:
                    self.source = layer
            layer = _inside(layer)

    @property
    def names(self) -> list[str]:
        """The class names of all layers, which tell an env from one that was built differently."""
        return [type(layer).__qualname__ for layer in self.chain]

    def attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of each layer that are state."""
        found = [_chosen(layer, _names_in(layer)) for layer in self.copied]
        if self.source is not None:
            found.append(_chosen(self.source, _WITH_A_PAIR))
        return found

    def replace(self, attributes: Sequence[dict[str, Any]]) -> None:
        """Restore the attributes that each layer had."""
        for layer, values in zip(self.copied, attributes, strict=False):
            kept = {n: v for n, v in vars(layer).items() if not _is_state(n, v)}
            if _names_in(layer) is None:
                vars(layer).clear()
            vars(layer).update(values)
            vars(layer).update(kept)
        if self.source is not None and hasattr(self.source, "__dict__"):
            vars(self.source).update(attributes[-1])


def _inside(layer: Any) -> Any:
    """Return the env that an env wraps; None if it wraps none."""
    attributes = getattr(layer, "__dict__", {})
    for name in ("env", "_env", "aec_env"):
        inner = attributes.get(name)
        if all(callable(getattr(inner, method, None)) for method in ("reset", "step")):
            return inner
    return None


def _names_in(layer: Any) -> tuple[str, ...] | None:
    """Return which attributes of a layer are state; None if all are."""
    return next((names for kind, names in _CHOSEN.items() if isinstance(layer, kind)), None)


def _chosen(layer: Any, names: Sequence[str] | None) -> dict[str, Any]:
    attributes = getattr(layer, "__dict__", {})
    return {
        n: v for n, v in attributes.items() if (names is None or n in names) and _is_state(n, v)
    }


def _is_state(name: str, value: Any) -> bool:
    return name != "render_mode" and not is_filmed(value)


@functools.lru_cache(maxsize=256)
def _pair_of(kind: type) -> tuple[str, str] | None:
    for pair in PAIRS:
        getter, setter = (getattr(kind, name, None) for name in pair)
        # With `self`. MuJoCo's `set_state` takes three.
        if takes(getter, None) and takes(setter, None, None):
            return pair
    return None


def refuse(env: Any, *, copies: bool) -> None:
    """Refuse an env whose state cannot be taken, as far as this can be told without taking it.

    Args:
        env: the env, in the form that `adapt` runs.
        copies: whether the attributes of an env that gives no state itself may be copied.

    Raises:
        NoStateError: there is no way to take the state.
    """
    if isinstance(env, BatchRow):
        raise NoStateError(
            f"it is row {env.row} of a batched env ({type(env.batched).__name__}), and rows have "
            "no state of their own"
        )
    layers = _Layers(env)
    if layers.source is None and not copies:
        known = ", ".join("/".join(pair) for pair in PAIRS)
        raise NoStateError(
            f"{env_name(layers.chain[-1])} has none of the methods {known}. Define get_state() and "
            "set_state(state), or set snapshot_copy: true if all of its state is in attributes "
            "that can be pickled"
        )
    for layer in layers.copied:
        has_slots = any(vars(cls).get("__slots__") for cls in type(layer).__mro__)
        if has_slots or not hasattr(layer, "__dict__"):
            raise NoStateError(f"{type(layer).__name__} has __slots__, which are not copied")


def take(env: Any, *, copies: bool) -> bytes:
    """Return the state of an env.

    Args:
        env: the env, in the form that `adapt` runs.
        copies: as for `refuse`.

    Raises:
        NoStateError: the state cannot be taken.
        Exception: whatever the env's own method raises.
    """
    refuse(env, copies=copies)
    layers = _Layers(env)
    given = None
    if layers.source is not None and layers.pair is not None:
        method = getattr(layers.source, layers.pair[0])
        named = inspect.signature(method).parameters if layers.pair[0] == "clone_state" else ()
        given = method(include_rng=True) if "include_rng" in named else method()
    attributes = layers.attributes()
    try:
        body = _pickled(_Body(attributes, given), layers)
    except Exception as error:  # whatever a __reduce__ may raise
        pass_interrupt_on(error)
        raise _unpicklable(attributes, given, layers, error) from error
    return pickle.dumps(layers.names) + body


def put(env: Any, state: bytes) -> None:
    """Put a state into an env.

    Args:
        env: the env, in the form that `adapt` runs.
        state: a state of this env, or of one that was built the same way, as `take` returned it.

    Raises:
        NoStateError: it is the state of another kind of env; nothing was changed.
        Exception: whatever the env's own method raises.
    """
    layers = _Layers(env)
    file = io.BytesIO(state)
    try:
        names = pickle.load(file)  # noqa: S301 (docs/security.md says who may load snapshots)
        if names != layers.names:
            raise NoStateError(
                f"the state is that of an env built as {' of '.join(names)}; this one is "
                f"{' of '.join(layers.names)}"
            )
        body = _Unpickler(file, layers).load()
        if type(body) is not _Body:
            raise TypeError(f"it is a {type(body).__name__}")
    except NoStateError:
        raise
    except (Exception, SystemExit) as error:  # whatever is unpickled may raise
        pass_interrupt_on(error)
        raise NoStateError(f"the state cannot be read: {error_text(error)}") from error
    if layers.pair is not None:  # first: it may raise, what follows does not
        getattr(layers.source, layers.pair[1])(body.given)
    layers.replace(body.attributes)


def _pickled(value: Any, layers: _Layers) -> bytes:
    file = io.BytesIO()
    _Pickler(file, layers).dump(value)
    return file.getvalue()


def _unpicklable(
    attributes: Sequence[dict[str, Any]], given: Any, layers: _Layers, error: Exception
) -> NoStateError:
    """Return an error that says which part of an env's state cannot be pickled."""
    owners = [*layers.copied, layers.source]
    for owner, values in zip(owners, attributes, strict=False):
        for name, value in values.items():
            try:
                _pickled(value, layers)
            except Exception as found:
                pass_interrupt_on(found)
                what = f"attribute {name!r} ({type(value).__name__}) of {type(owner).__name__}"
                return NoStateError(f"{what} cannot be pickled: {error_text(found)}")
    what = "its state" if layers.pair is None else f"what its {layers.pair[0]}() returns"
    return NoStateError(f"{what} cannot be pickled: {error_text(error)}")


class _Pickler(pickles.Pickler):
    """A pickler of what layers hold, but not of the layers, nor of classes of a script."""

    def __init__(self, file: io.BytesIO, layers: _Layers) -> None:
        super().__init__(file)
        self._places = {id(layer): place for place, layer in enumerate(layers.chain)}

    def persistent_id(self, obj: Any) -> Any:
        place = self._places.get(id(obj))
        if place is None and isinstance(obj, type) and pickles.is_of_script(obj):
            return obj.__qualname__  # pickled whole, it would come back as another class
        return place

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), EzPickle):
            raise NoStateError(
                f"a {type(obj).__name__} is pickled as how it was built, without its state; give "
                "the env that holds it get_state() and set_state(state)"
            )
        if isinstance(obj, io.TextIOWrapper):  # cloudpickle would copy what is in the file
            raise TypeError("it is an open file")
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds the layers, and classes of a script, in the env at hand."""

    def __init__(self, file: io.BytesIO, layers: _Layers) -> None:
        super().__init__(file)
        self._chain = layers.chain

    def persistent_load(self, key: Any) -> Any:
        return self._chain[key] if isinstance(key, int) else self._class(key)

    def _class(self, qualname: str) -> Any:
        """Return a class by its name, as the env's own functions know it."""
        first, *rest = qualname.split(".")
        for layer in self._chain:
            for member in (m for cls in type(layer).__mro__ for m in vars(cls).values()):
                found = getattr(member, "__globals__", {}).get(first)
                for name in rest:
                    found = getattr(found, name, None)
                if isinstance(found, type) and found.__qualname__ == qualname:
                    return found
        raise NoStateError(f"class {qualname} is not known to the env's script any more")

"""What DI-engine's V2 managers make of timesteps, written down with treetensor's own functions.

Read in DI-engine 0.5.3, in which `SubprocessEnvManagerV2` and `BaseEnvManagerV2` do the same:

- a timestep is `treetensor.numpy.array` of a dict with `obs reward done info env_id`;
- of the keys of its info, those that begin with a digit get an underscore before it, and dots
  become underscores; what is text is left out;
- `ready_obs` is `treetensor.numpy.stack` of the observations of the ready envs, each of which was
  made a tree before if it is a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmgr import EnvTimestep


def timestep_of(env_id: int, timestep: EnvTimestep) -> Any:
    """Return the tree that DI-engine makes of a timestep."""
    import treetensor.numpy as tnp

    told = {}
    for key, value in timestep.info.items():
        prefix = "_" if key[0] in "0123456789" else ""
        if type(value) is not str:
            told[prefix + "_".join(key.split("."))] = value
    fields = {"env_id": env_id, "info": told}
    return tnp.array({**timestep._asdict(), **fields})


def ready_obs_of(observations: Mapping[int, Any]) -> Any:
    """Return what DI-engine's `ready_obs` is for these observations of the ready envs."""
    import treetensor.numpy as tnp

    are_dicts = isinstance(next(iter(observations.values())), dict)
    return tnp.stack([tnp.array(o) if are_dicts else o for o in observations.values()])


def assert_same(found: Any, expected: Any, path: str = "it") -> None:
    """Check that two trees (or arrays) are the same: types, keys, dtypes, shapes and values."""
    import treetensor.numpy as tnp

    assert type(found) is type(expected), path
    if isinstance(expected, tnp.ndarray):
        assert set(found.keys()) == set(expected.keys()), path
        for key in expected.keys():  # noqa: SIM118 (iterating over a tree gives its values)
            assert_same(found[key], expected[key], f"{path}.{key}")
            assert_same(getattr(found, key), expected[key], f"{path}.{key}")
        return
    assert type(found) is np.ndarray, path
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
    assert np.array_equal(found, expected), path
    assert found.flags.writeable, path


def assert_same_tensors(found: Any, expected: Any, path: str = "it") -> None:
    """Check that two trees of torch's tensors are the same."""
    import torch

    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert torch.equal(found, expected), path
        return
    assert set(found.keys()) == set(expected.keys()), path
    for key in expected.keys():  # noqa: SIM118
        assert_same_tensors(found[key], expected[key], f"{path}.{key}")

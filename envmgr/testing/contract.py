"""Test suites for envs and kinds of managers of your own. Subclass them and run them with pytest.

    class TestMyEnv(EnvContract):
        def make_env(self):
            return MyEnv()

    class TestMyManager(WorkerManagerContract):
        def make_manager(self, env_fn, **cfg):
            return create_env_manager({"type": "my_kind", **cfg}, env_fn=env_fn)

Nothing here imports pytest, and nothing relies on `assert`: the suites work under `python -O`, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from envmgr import errors
from envmgr.testing.audited import AuditedLoop
from envmgr.testing.env_problems import env_problems
from envmgr.testing.faulty import Fault, FaultyEnv
from envmgr.testing.ledger_env import without_instance
from envmgr.types import EnvTimestep, is_abnormal

PATIENCE_S = 20.0
"""How long a suite waits for something that has to happen."""


def require(condition: object, message: str) -> None:
    """Fail unless a condition holds.

    Raises:
        AssertionError: with the message.
    """
    if not condition:
        raise AssertionError(message)


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Fail unless the code inside raises one of these errors.

    Raises:
        AssertionError: nothing was raised, or something else.
    """
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except Exception as error:
        raise AssertionError(f"{names} should be raised, not {type(error).__name__}") from error
    raise AssertionError(f"{names} should be raised, and nothing was")


class EnvContract:
    """A test suite for what managers expect of envs; see `env_problems` for all that is checked.

    Attributes:
        n_steps: the number of random steps to take.
        seed: the seed to reset with.
    """

    n_steps = 50
    seed = 0

    def make_env(self) -> Any:
        """Return a new env."""
        raise TypeError(f"{type(self).__name__} should define make_env(self), which builds an env")

    def _expect_none(self, *kinds: str) -> None:
        problems = env_problems(self.make_env, n_steps=self.n_steps, seed=self.seed)
        mine = [problem for problem in problems if problem.kind in kinds]
        require(not mine, "\n".join(map(str, mine)))

    def test_the_factory_builds_envs_and_can_be_sent_to_workers(self) -> None:
        """The factory can be pickled, and returns an env."""
        self._expect_none("factory")

    def test_the_spaces_are_there_and_can_be_laid_out(self) -> None:
        """The spaces are there before the first reset, or after one."""
        self._expect_none("spaces")

    def test_resets_and_steps_give_what_they_should(self) -> None:
        """The results have the right types."""
        self._expect_none("reset", "step")

    def test_observations_have_the_structure_and_shape_of_their_space(self) -> None:
        """This holds for resets and for steps."""
        self._expect_none("observation")

    def test_the_same_seed_gives_the_same_trajectory(self) -> None:
        """This is checked only if the env takes seeds."""
        self._expect_none("seed")

    def test_it_can_be_closed(self) -> None:
        """Closing also works without a reset."""
        self._expect_none("close")


class _Run:
    """A launched manager of faulty envs that sign, and the loop over it that keeps the accounts."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.loop = AuditedLoop(manager)
        self.ledger = self.loop.ledger

    def ready(self, env_ids: Sequence[int] | None = None) -> dict[int, Any]:
        """Return observations of ready envs, once these (None: at least one) are among them."""
        end = time.monotonic() + PATIENCE_S
        while True:
            obs = self.loop.ready()
            if env_ids is None or set(env_ids) <= obs.keys():
                return obs
            require(time.monotonic() < end, f"envs {env_ids} do not become ready: only {[*obs]}")
            self.manager.get_attr("action_space", env_ids=env_ids)  # waits for these

    def send(self, env_ids: Sequence[int]) -> None:
        """Send actions to these envs."""
        self.loop.send(self.ledger.fresh_actions(env_ids))

    def step(self, env_ids: Sequence[int]) -> dict[int, EnvTimestep]:
        """Step these envs."""
        return self.loop.step(self.ledger.fresh_actions(env_ids))

    def gather_all(self) -> dict[int, EnvTimestep]:
        """Gather until nothing is under way."""
        timesteps: dict[int, EnvTimestep] = {}
        while self.ledger.pending:
            gathered = self.loop.gather()
            require(gathered, "recv returned nothing, though steps are under way")
            timesteps |= gathered
        return timesteps

    def step_all(self, env_ids: Sequence[int]) -> dict[int, EnvTimestep]:
        """Step these envs, and gather until nothing is under way."""
        return self.step(env_ids) | self.gather_all()

    def end(self) -> None:
        """Gather what is under way, and check the accounts."""
        self.gather_all()
        self.ledger.end()
        self.ledger.check()


class ManagerContract:
    """A test suite for what every kind of manager promises.

    For kinds with worker processes there is `WorkerManagerContract`. The envs of the suite are
    `FaultyEnv`s, which sign their timesteps; a `Ledger` finds what is lost, repeated or swapped.

    Attributes:
        gathers_all: whether `step` returns the timesteps of all actions it was given, in their
            order; if not, it returns some of the outstanding ones, in ascending order of env_id.
        shows_arrays: whether observations are numpy arrays, as in `{env_id: obs}` (not in V2
            kinds).
    """

    gathers_all = True
    shows_arrays = True

    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        """Return a manager that is not launched.

        Args:
            env_fn: one factory for each env.
            **cfg: keys of its config, such as `seed`, `step_timeout` and `max_failures`.
        """
        raise TypeError(
            f"{type(self).__name__} should define make_manager(self, env_fn, **cfg), which returns "
            "a manager that is not launched"
        )

    @contextmanager
    def run(
        self, env_num: int = 3, plan: Sequence[Fault] = (), *, length: int = 5, **cfg: Any
    ) -> Iterator[_Run]:
        """Yield a launched manager of `env_num` envs, and check the accounts at the end."""
        make = functools.partial(FaultyEnv, plan=tuple(plan), episode_length=length)
        manager = self.make_manager([functools.partial(make, i) for i in range(env_num)], **cfg)
        try:
            manager.launch()
            run = _Run(manager)
            yield run
            run.end()
        finally:
            manager.close()

    # -- timesteps ----------------------------------------------------------------------------

    def test_every_action_gives_exactly_one_timestep(self) -> None:
        """The timestep is the right one: of that env, that action and that step."""
        with self.run(4) as run:
            for _ in range(30):
                run.step([*run.ready()])

    def test_timesteps_come_in_order(self) -> None:
        """The order is that of the actions for sync kinds, and of the env_ids for async ones."""
        with self.run(4) as run:
            for env_ids in ([3, 0, 2], [1], [2, 1, 3, 0]):
                run.ready(range(4))
                found = [*run.step(env_ids)]
                if self.gathers_all:
                    require(found == env_ids, f"step({env_ids}) returned {found}")
                else:
                    require(found == sorted(found), f"step({env_ids}) returned {found}")
                    require(set(found) <= set(env_ids), f"step({env_ids}) returned {found}")
                run.gather_all()

    def test_send_and_recv_gather_in_parts(self) -> None:
        """`recv(min_ready=1)` returns what there is, and the rest comes later."""
        with self.run(3) as run:
            run.ready(range(3))
            run.send([2, 0])
            run.send([1])
            n_recv = 0
            while run.ledger.pending:
                require(run.loop.gather(min_ready=1), "recv(min_ready=1) returned nothing")
                n_recv += 1
            require(n_recv <= 3, "recv returned a timestep twice")

    def test_nothing_comes_of_nothing(self) -> None:
        """If nothing is under way, `recv` raises instead of waiting."""
        with self.run(2) as run:
            run.ready()
            with refused(errors.StateError):
                run.manager.recv()

    # -- refusals -----------------------------------------------------------------------------

    def test_bad_calls_are_refused_before_anything_is_sent(self) -> None:
        """A call is refused as a whole if one part of it is wrong."""
        with self.run(3) as run:
            run.ready(range(3))
            for actions, error in (
                ({0: 1, 3: 1}, errors.UnknownEnvError),
                ({0: 1, -1: 1}, errors.UnknownEnvError),
                ({0: 1, 1: -5}, errors.EnvManagerError),
                ({0: 1, 1: "left"}, errors.EnvManagerError),
                ({0: 1, 1: np.zeros(3)}, errors.EnvManagerError),
            ):
                with refused(error):
                    run.manager.send(actions)
            run.send([1])
            with refused(errors.EnvNotReadyError):
                run.manager.send({0: 1, 1: 1})
            run.ready()
            run.end()
            run.ready(range(3))
            run.step_all([0, 1, 2])
            # This shows at the end: an action that was sent all the same would be a step that
            # nobody was given.

    # -- observations -------------------------------------------------------------------------

    def test_observations_stay_as_they_are_and_belong_to_their_reader(self) -> None:
        """Writing into an observation changes no other, and later steps do not change it."""
        if not self.shows_arrays:
            return
        with self.run(2) as run:
            kept: list[tuple[Any, Any]] = []
            for _ in range(8):
                obs = run.ready(range(2))
                kept += [(one, one.copy()) for one in obs.values()]
                for step in run.step_all([0, 1]).values():
                    kept.append((step.obs, step.obs.copy()))
            for one, copied in kept:
                require(np.array_equal(one, copied), "an observation changed after it was read")
            before = [copied for _, copied in kept]
            kept[-1][0][...] = -1
            for (one, _), copied in zip(kept[:-2], before[:-2], strict=True):
                require(np.array_equal(one, copied), "two observations share their memory")

    def test_the_end_of_an_episode_and_the_beginning_of_the_next_are_both_seen(self) -> None:
        """The last timestep has the terminal observation, `ready_obs` the next episode's first."""
        with self.run(2, length=3) as run:
            for _ in range(2):
                for k in range(1, 4):
                    run.ready(range(2))
                    for step in run.step_all([0, 1]).values():
                        require(step.done == (k == 3), f"step {k} of 3 has done={step.done}")
                        require(_part(step.obs, 3) == k, f"step {k} has another observation")
                for env_id, obs in run.ready(range(2)).items():
                    text = f"env {env_id} does not show the first observation of its next episode"
                    require(_part(obs, 3) == 0, text)

    # -- failures and ends --------------------------------------------------------------------

    def test_an_env_that_raises_gives_an_abnormal_timestep_and_goes_on(self) -> None:
        """The timestep has the last observation and a typed failure; other envs are unaffected."""
        self._check_fault(Fault("raise", env_id=1, episode=1, step=1), errors.EnvRaised)

    def _check_fault(self, fault: Fault, kind: type[errors.EnvManagerError], **cfg: Any) -> None:
        """Compare a run with a fault to one without: all envs but the victim are the same."""
        with self.run(3, seed=5, **cfg) as run:
            right = self._trajectories(run, [fault.env_id])
        with self.run(3, [fault], seed=5, **cfg) as run:
            found = self._trajectories(run, [])
            others = {i: steps for i, steps in found.items() if i != fault.env_id}
            for env_id, steps in others.items():
                require(steps == right[env_id], f"env {env_id} felt the fault of {fault.env_id}")
            latest = run.manager.stats()["failures_by_kind"]
            require(kind.__name__ in latest, f"the failures are {latest}, not {kind.__name__}")
            require(run.ledger.report().abnormal == 1, "there should be one abnormal timestep")

    def _trajectories(self, run: _Run, without: Sequence[int | None]) -> dict[int, list[Any]]:
        """Step all envs together; return what each of them gave, without the instances."""
        ids = range(run.manager.env_num)
        given: dict[int, list[Any]] = {i: [] for i in ids if i not in without}
        for _ in range(8):
            run.ready(ids)
            for env_id, step in run.step_all([*ids]).items():
                if is_abnormal(step.info):
                    require(step.done, "an abnormal timestep ends its episode")
                    require(np.asarray(step.reward).item() == 0.0, "its reward is 0.0")
                if env_id in given:
                    obs = without_instance(np.asarray(step.obs))
                    given[env_id].append((obs.tobytes(), step.done))
        run.ready(ids)
        run.end()
        return given

    def test_the_same_seed_gives_the_same_run(self) -> None:
        """Two launches with the same seed give the same run."""
        runs = []
        for _ in range(2):
            with self.run(3, seed=11) as run:
                runs.append(self._trajectories(run, []))
        require(runs[0] == runs[1], "two launches with the same seed differ")

    def test_a_launch_that_fails_leaves_nothing(self) -> None:
        """One error holds all failures, and the manager is closed."""
        plan = [Fault("raise", where="construction", env_id=1)]
        make = functools.partial(FaultyEnv, plan=plan)
        manager = self.make_manager([functools.partial(make, i) for i in range(3)])
        try:
            with refused(errors.LaunchError):
                manager.launch()
            require(manager.closed, "the manager is not closed after a launch that failed")
        finally:
            manager.close()

    def test_close_ends_everything_and_may_be_repeated(self) -> None:
        """Afterwards calls are refused, and the manager can be launched again."""
        with self.run(2) as run:
            run.ready(range(2))
            run.send([0])
            for _ in range(2):
                run.manager.close()
            require(run.manager.closed, "closed is false after close()")
            with refused(errors.ManagerClosedError):
                run.manager.step({0: 1})
            with refused(errors.ManagerClosedError):
                run.loop.ready()
            stats = run.manager.stats()
            accounted = stats["timesteps"] + stats["cancelled"]
            require(stats["actions"] == accounted, f"close lost an action: {stats}")
            run.ledger.reset([0, 1])
            run.manager.launch()
            run.ready(range(2))
            run.step_all([0, 1])

    def test_a_reset_begins_a_new_episode_and_gives_up_what_is_under_way(self) -> None:
        """The timestep under way counts as cancelled."""
        with self.run(2) as run:
            run.ready(range(2))
            run.step_all([0, 1])
            run.ready(range(2))
            run.send([0])
            run.loop.reset([0])
            require(_part(run.ready([0])[0], 3) == 0, "the reset began no episode")
            run.step_all([0])
            require(run.manager.stats()["cancelled"] == 1, "a timestep should be cancelled")


class WorkerManagerContract(ManagerContract):
    """A test suite for what kinds with worker processes promise in addition."""

    def test_stats_name_the_workers(self) -> None:
        """The stats give each worker's pid and the envs it serves; every env has a worker."""
        with self.run(3) as run:
            workers = run.manager.stats()["workers"]
            served = sorted(i for worker in workers for i in worker["env_ids"])
            require(served == [0, 1, 2], f"the workers are {workers}")

    def test_a_worker_that_is_killed_is_replaced(self) -> None:
        """`kill -9` costs one timestep of that env; the other envs are unaffected."""
        self._check_fault(Fault("kill", env_id=1, episode=1, step=1), errors.EnvCrash)

    def test_a_worker_that_ends_itself_is_replaced(self) -> None:
        """`os._exit` costs the same as `kill -9`."""
        self._check_fault(
            Fault("os_exit", env_id=1, episode=1, step=1, argument=0), errors.EnvCrash
        )

    def test_a_worker_that_hangs_is_replaced(self) -> None:
        """The worker hangs in C, holds the GIL and does not react to signals."""
        fault = Fault("hang_holding_gil", env_id=1, episode=1, step=1)
        self._check_fault(fault, errors.EnvTimeout, step_timeout=2.0)


def _part(obs: Any, place: int) -> int:
    return int(np.asarray(obs)[place])

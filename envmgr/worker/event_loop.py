"""The event loop of a worker that runs async envs, and what is under way in it for each of them.

Code that serves sync and async envs alike is written as generators (`Steps`). `finish` runs one
that waits for nothing, at the cost of a call; `WorkerLoop.run` runs one at once until it yields,
and the rest as a task: the first `yield` enters the event loop. So a worker without async envs has
no loop, and does not even import asyncio. (Coroutines would do as well. But if Ctrl-C comes between
the creation of a coroutine and its first step, in the trainer, Python warns that it was never
awaited.)
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from envmgr.env.async_env import use_loop
from envmgr.env.contract import EnvContractError
from envmgr.wire.messages import FailureKind, Message, RemoteFailure

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

NO_LOOP = (
    "async envs (with `async def step` or `reset`, or an async factory) run on the event loop of a "
    "worker process: use type: subprocess, async_subprocess or one of their v2 kinds. This kind "
    "runs its envs in the trainer's process, or on a cluster"
)


Steps = Generator[Any, Any, T]
"""A generator that may have to wait for something, and returns a T."""


def done(value: T) -> Steps[T]:
    """Wait for nothing and return a value."""
    yield from ()
    return value


def _wait_for(coroutine: Coroutine[Any, Any, T]) -> Steps[T]:
    result: T = yield from coroutine  # type: ignore[misc]
    return result


wait_for: Callable[[Coroutine[Any, Any, T]], Steps[T]]
wait_for = types.coroutine(_wait_for)  # type: ignore[assignment]
"""Waits for a coroutine, in the event loop."""


class AwaitableSteps(Generic[T]):
    """Steps that a coroutine can await."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def __await__(self) -> Steps[T]:
        return self._steps


def finish(steps: Steps[T]) -> T:
    """Run steps that wait for nothing; return their result.

    Raises:
        EnvContractError: they wait for something.
    """
    try:
        steps.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    steps.close()
    raise EnvContractError(NO_LOOP)


class WorkerLoop:
    """The event loop of a worker process; there is none until something has to wait.

    Args:
        note_running: is told which env's code is running: its env_id + 1, or 0 for none.

    Attributes:
        note_running: likewise.
        loop: the loop; None until something has to wait.
    """

    def __init__(self, note_running: Callable[[int], None] | None = None) -> None:
        self.note_running = note_running or _ignore
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: list[BaseException] = []
        self._wake: Callable[[], object] | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run steps at once until they wait for something, and the rest as a task.

        Args:
            coroutine: the steps as a coroutine, which has not entered the loop yet.

        Returns:
            The task; None if the coroutine has finished.
        """
        try:
            coroutine.send(None)
        except StopIteration:
            return None
        task: asyncio.Task[None] = self._made().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def is_used(self) -> bool:
        """Whether something has had to wait already."""
        return self.loop is not None

    def run_sync(self, function: Callable[[], None], env_id: int) -> None:
        """Run work of a sync env beside async envs, and note that its code is running."""
        self.note_running(env_id + 1)
        try:
            function()
        finally:
            self.note_running(0)

    def wake(self) -> None:
        """Have another round follow, though nothing can be read; to be called in the loop."""
        if self._wake is not None:
            self._wake()

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, where the loop is not running."""
        self._made().run_until_complete(coroutine)

    def _made(self) -> asyncio.AbstractEventLoop:
        """Return the loop; make it if there is none."""
        if self.loop is None:
            import asyncio  # most workers need none, and it takes long to import

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
            use_loop(self.loop)
        return self.loop

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # of envmgr's own code, or the trainer is gone
            self._failed.append(error)
            self.wake()

    def serve(
        self,
        run_round: Callable[[], bool],
        close: Callable[[], Coroutine[Any, Any, None]],
        fds: tuple[int, ...],
    ) -> None:
        """Run the loop until a round says that it is the last one.

        Args:
            run_round: called in the loop whenever one of `fds` can be read; true ends the loop.
            close: awaited after that.
            fds: file descriptors.

        Raises:
            BaseException: what a task, or a round, has raised.
        """
        serving = self._made().create_task(self._serve(run_round, close, fds))
        while not serving.done():
            try:
                self._made().run_until_complete(serving)
            except (SystemExit, KeyboardInterrupt):
                # It is from a task of an env, as workers ignore Ctrl-C: whoever awaits it is told.
                if serving.done():
                    raise

    async def _serve(
        self,
        run_round: Callable[[], bool],
        close: Callable[[], Coroutine[Any, Any, None]],
        fds: tuple[int, ...],
    ) -> None:
        import asyncio

        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = readable.set
        for fd in fds:
            loop.add_reader(fd, readable.set)
        while not run_round():
            await readable.wait()
            readable.clear()
            if self._failed:
                raise self._failed[0]
        await close()


def _ignore(number: int) -> None:
    """Stand in where nobody is told which env is run."""


async def in_own_thread(function: Callable[[], T]) -> T:
    """Return the result of a function that may wait for coroutines of this loop.

    A thread of the loop's pool would not do: if all threads of the pool waited for coroutines that
    need one, none would go on. If this is cancelled, the thread is left to itself.
    """
    import asyncio
    import threading
    from concurrent.futures import Future

    ended: Future[tuple[T | None, BaseException | None]] = Future()
    ended.set_running_or_notify_cancel()  # its result is set in any case

    def run() -> None:
        try:
            outcome = function(), None
        except BaseException as error:  # a future does not take each as its exception
            ended.set_result((None, error))
        else:
            ended.set_result(outcome)

    threading.Thread(target=run, name="envmgr-apply", daemon=True).start()
    result, error = await asyncio.wrap_future(ended)
    if error is not None:
        raise error
    return cast("T", result)


class _Noted(Coroutine[Any, Any, T]):
    """Steps as a coroutine that tells when they are running, and whose they are.

    Args:
        note: is told that.
        number: the env whose steps they are, as `WorkerLoop.note_running` is told.
    """

    __slots__ = ("_inside", "_note", "_number")

    def __init__(self, inside: Steps[T], note: Callable[[int], None], number: int) -> None:
        self._inside, self._note, self._number = inside, note, number

    def send(self, value: Any, /) -> Any:
        """Run the steps until they wait for something."""
        self._note(self._number)
        try:
            return self._inside.send(value)
        finally:
            self._note(0)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the steps, and run them until they wait for something."""
        self._note(self._number)
        try:
            return self._inside.throw(*error)
        finally:
            self._note(0)

    def close(self) -> None:
        """End the steps."""
        self._inside.close()

    def __await__(self) -> Steps[T]:
        return self._inside


class EnvWork:
    """The work that is under way in the event loop for one env, one thing at a time.

    Args:
        loop: the worker's loop; None if there can be none.

    Attributes:
        where: where the present work was when the trainer had it cancelled; None if it was not.
    """

    def __init__(self, loop: WorkerLoop | None) -> None:
        self.loop = loop
        self.where: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._steps: Any = None
        self._doing: tuple[int, str] = (0, "")

    def run(self, steps: Steps[None], request: Message, during: str) -> None:
        """Run the steps that answer a request, at once as far as possible, the rest in the loop.

        Args:
            steps: the steps.
            request: the request.
            during: what the request does, as in `RemoteFailure`.
        """
        self.where = None
        if self.loop is None:
            finish(steps)
        else:
            self._doing, self._steps = (request.request_id, during), steps
            noted = _Noted(steps, self.loop.note_running, request.env_id + 1)
            self._task = self.loop.run(noted)

    def cancel(self, request_id: int, during: str) -> None:
        """Cancel the work that answers a request, if under way; `during` is as for `run`."""
        task = self._task
        if task is not None and not task.done() and (request_id, during) == self._doing:
            self.where = _where(self._steps)
            task.cancel()

    def cancelled(self, during: str) -> RemoteFailure | None:
        """Return the failure to report if the trainer had the present work cancelled, else None."""
        if self.where is None:
            return None
        return RemoteFailure(FailureKind.CANCELLED, during, traceback_text=self.where)

    def run_after(self, then: Callable[[], None], request: Message, during: str) -> None:
        """Call `then` when the work under way has ended; the other arguments are as for `run`.

        To cancel this is to cancel the work under way, and `where` then says where that was.
        """
        earlier, steps = self._task, self._steps
        self.run(_run_after(then, earlier), request, during)
        if earlier is not None and not earlier.done():
            self._steps = steps

    def stop(self) -> Steps[None]:
        """Cancel what is under way, unless it is the caller, and wait for its end."""
        task, self._task = self._task, None
        if task is None or task.done():
            return
        yield
        import asyncio

        if task is not asyncio.current_task():
            task.cancel()
            yield from wait_for(asyncio.wait([task]))


def _run_after(then: Callable[[], None], earlier: asyncio.Task[None] | None) -> Steps[None]:
    if earlier is not None and not earlier.done():
        import asyncio

        try:
            yield  # here too: it may be cancelled before its first turn
            yield from wait_for(asyncio.wait([earlier]))
        except asyncio.CancelledError:
            earlier.cancel()
            yield from wait_for(asyncio.wait([earlier]))
    then()


def _where(coroutine: Any) -> str:
    """Return the stack of steps that wait, down to the innermost coroutine."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frames.append((frame, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    while len(frames) > 1 and _is_own(frames[0][0]):
        del frames[0]
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


def _is_own(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("envmgr.")

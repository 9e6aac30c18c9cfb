"""Sets up a worker process, builds its envs, and runs requests until it is told to end."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fnmatch
import functools
import mmap
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from envmgr.errors import ConfigError
from envmgr.proc import resident_bytes
from envmgr.types import EnvFactory
from envmgr.wire.channel import ChannelClosedError, FrameChannel
from envmgr.wire.frames import FrameError, encode
from envmgr.wire.hosts import HostSettings, WorkerSettings, WorkerSetup, hellos
from envmgr.wire.large_messages import LargeMessageBuffer
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from envmgr.worker import crash_report, log_file, process_name
from envmgr.worker.block_steps import BlockStepper, block_stepper
from envmgr.worker.event_loop import WorkerLoop
from envmgr.worker.host import Host
from envmgr.worker.imported_modules import report_imports
from envmgr.worker.serving import ConnectionInbox, serve

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Prefixes, not patterns: each worker would have to compile patterns for itself, which takes longer
# than everything else that it does until its envs are built.
_MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_", "MPICH_", "HYDRA_", "SLURM_MPI")
_ALWAYS_ALLOWED = frozenset({"PATH", "HOME", "LANG", "VIRTUAL_ENV", "TEMP", "SYSTEMROOT"})
_ALWAYS_ALLOWED_PREFIXES = ("LC_", "PYTHON", "TMP")


def worker_environment(environment: Mapping[str, str], settings: WorkerSettings) -> dict[str, str]:
    """Return the environment variables of a worker.

    MPI's are left out (an env that initialises MPI would join the trainer's job). The settings
    `allow` (which spares what Python itself needs) and `deny` apply next, then the cap of math
    threads, then `set`.
    """
    result = {
        name: value
        for name, value in environment.items()
        if _is_allowed(name, settings.allow) and not _is_denied(name, settings.deny)
    }
    if settings.threads is not None:
        result.update(dict.fromkeys(_THREAD_VARIABLES, str(settings.threads)))
    return {**result, **settings.set}


def _is_allowed(name: str, patterns: tuple[str, ...]) -> bool:
    needed = name in _ALWAYS_ALLOWED or name.startswith(_ALWAYS_ALLOWED_PREFIXES)
    return needed or _matches(name, patterns)


def _is_denied(name: str, patterns: tuple[str, ...]) -> bool:
    return name.startswith(_MPI_PREFIXES) or _matches(name, patterns)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def replace_environment(target: MutableMapping[str, str], source: Mapping[str, str]) -> None:
    """Make `target` equal to `source`, touching only what differs."""
    for name in [name for name in target if name not in source]:
        del target[name]
    for name, value in source.items():
        if target.get(name) != value:
            target[name] = value


def isolate_process() -> None:
    """Detach this process from the trainer's terminal, and give it randomness of its own."""
    with contextlib.suppress(PermissionError):  # already the leader of its session
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Envs have processes of their own to wait for, whatever the trainer does with its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.set_wakeup_fd(-1)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the trainer has none; its envs may print all the same
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for good
    random.seed()
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    with contextlib.suppress(Exception):  # a stderr without an fd
        faulthandler.enable()


def end_with_parent(parent_waitable: Any) -> None:
    """End this process and its children when the parent is gone, even while env code hangs.

    Args:
        parent_waitable: becomes readable when the parent has exited.
    """

    def watch() -> None:
        wait([parent_waitable])
        kill_own_group()

    threading.Thread(target=watch, name="envmgr-end-with-parent", daemon=True).start()


def flush_streams() -> None:
    """Flush what was printed to stdout and stderr, which may be closed, broken or missing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def kill_own_group() -> None:
    """Kill this process, and its process group if it leads one; never returns."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


_CLOSED = (
    "envmgr: this worker has lost its connection: code of an env has closed a file descriptor that "
    "is not its own"
)


def run_worker(
    channel: FrameChannel,
    fds: tuple[int, ...],
    factories: Mapping[int, EnvFactory] | None = None,
    report_fd: int | None = None,
) -> int:
    """Set the process up, build the envs, and run requests until CLOSE or a lost connection.

    Args:
        channel: the blocking end of the channel to the parent.
        fds: the file for crash reports, where they are kept; then the shared memory, the parent's
            doorbell and this worker's own doorbell, or only the first of these three, or none.
        factories: the factories of its envs, by env_id, if the process inherited them.
        report_fd: the pipe for the names of the modules that were imported to build the envs, if
            these are wanted.

    Returns:
        The exit code.
    """
    known = frozenset(() if report_fd is None else sys.modules)
    for fd in (*channel.fds, *fds):  # what envs start by `exec` gets none of them
        os.set_inheritable(fd, False)
    crash_fd, shared_fds = (fds[0], fds[1:]) if crash_report.ARE_KEPT else (None, fds)
    inbox = ConnectionInbox(channel, shared_fds[2] if len(shared_fds) > 2 else None)
    try:
        if (first := inbox.next()) is None or first.op != Op.HELLO:
            return 0  # the launch has failed before it began
        setup: WorkerSetup = first.payload
        recorder = _set_up(setup, crash_fd)
        try:
            settings: HostSettings = pickle.loads(setup.settings)  # noqa: S301 - from the parent
        except Exception as error:  # whatever a __setstate__ of a space may raise
            _report_unreadable_settings(setup, error, channel)
            settings, factories, setup = HostSettings(), {}, setup._replace(envs=())
        stepper = _block_stepper(setup, settings, shared_fds)
        host = Host(
            _factories(setup, factories),
            settings,
            encode=_encoder(setup, shared_fds),
            send=channel.send,
            memory=functools.cache(lambda nbytes: _open_memory(shared_fds, nbytes)),
            rss_bytes=resident_bytes,
            stepper=stepper,
            loop=WorkerLoop(None if recorder is None else recorder.note_running),
        )
        for message in hellos(setup.envs):
            host.handle(message)
        if report_fd is not None:
            report_imports(report_fd, known)
        serve(host, stepper, inbox)
    except ChannelClosedError as error:  # the parent is gone, or has let go of this worker
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EBADF:
            print(_CLOSED, file=sys.stderr, flush=True)
            return 1  # the parent is there, and no signal has ended it
        flush_streams()
        kill_own_group()  # nobody may be there any more who ends what it has started
    return 0


def _report_unreadable_settings(
    setup: WorkerSetup, error: Exception, channel: FrameChannel
) -> None:
    """Report for every env that it cannot be built."""
    text = f"the settings cannot be unpickled: {type(error).__name__}: {error}"
    failure = RemoteFailure(FailureKind.PROTOCOL, "construction", message=text)
    for env_id, generation, request_id, _ in setup.envs:
        channel.send(encode(Message(Op.FAILED, env_id, generation, request_id, failure)))


def _block_stepper(
    setup: WorkerSetup, settings: HostSettings, shared_fds: tuple[int, ...]
) -> BlockStepper | None:
    """Return the stepper for posted steps; None if the trainer has no doorbell."""
    if len(shared_fds) < 2:
        return None
    ring, timed = functools.partial(_ring, shared_fds[1]), bool(settings.announced)
    return block_stepper(
        setup.host_index,
        ring,
        timed=timed,
        spin_s=setup.worker.spin_s,
        measures=settings.measures,
    )


def _encoder(setup: WorkerSetup, shared_fds: tuple[int, ...]) -> Callable[[Message], bytes]:
    """Return the encoder of replies: large replies go through a buffer, if there is one."""
    if setup.buffer is None:
        return encode
    return LargeMessageBuffer(shared_fds[0], setup.buffer).encode


def _factories(
    setup: WorkerSetup, inherited: Mapping[int, EnvFactory] | None
) -> Mapping[int, EnvFactory]:
    """Return the factories of the envs, by env_id."""
    if inherited is not None:
        return {env_id: inherited[env_id] for env_id, _, _, _ in setup.envs}
    made = [_Factory(pickled) for pickled in setup.factories]
    return {env_id: made[index] for env_id, _, _, index in setup.envs}


class _Factory:
    """A factory that is unpickled when it is called, so that failures count as construction."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self) -> Any:
        return pickle.loads(self._pickled)()  # noqa: S301 - from the parent, over its own socket


def _set_up(setup: WorkerSetup, crash_fd: int | None) -> crash_report.CrashRecorder | None:
    index, settings = setup.host_index, setup.worker
    process_name.name_worker(index, (env_id for env_id, _, _, _ in setup.envs))
    # This comes first, so that the last words of whatever fails here are recorded.
    recorder = None if crash_fd is None else crash_report.record_crashes(crash_fd, index)
    if settings.log is not None:
        ids, generations, _, _ = zip(*setup.envs, strict=True)
        file = log_file.LogFile(index, ids, max(generations))
        log_file.write_to_log_file(settings.log, file)
    set_up(index, settings)
    return recorder


def set_up(index: int, settings: WorkerSettings) -> None:
    """Give this process the environment variables, cores and threads of a worker.

    Args:
        index: index of the worker among the manager's hosts.
        settings: the settings of the worker.
    """
    replace_environment(os.environ, worker_environment(os.environ, settings))
    current_process()._config["daemon"] = settings.daemon  # type: ignore[attr-defined]
    if settings.affinity is not None and hasattr(os, "sched_setaffinity"):
        _keep_to(settings.affinity[index % len(settings.affinity)])
    torch = sys.modules.get("torch")
    if torch is not None and settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _keep_to(cores: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"manager.worker_affinity gives a worker the cores {[*cores]}, none of which it may "
            f"run on ({error}). Those of its parent are {sorted(os.sched_getaffinity(0))}."
        ) from None


def _ring(bell: int) -> None:
    try:
        os.eventfd_write(bell, 1)
    except BlockingIOError:
        return  # it has been rung often enough


def _open_memory(shared_fds: tuple[int, ...], nbytes: int) -> mmap.mmap:
    if not shared_fds:
        raise FrameError("observations are placed in shared memory, but there is none")
    return mmap.mmap(shared_fds[0], nbytes)

"""Environment variables that a config file may set in workers, and to what.

A variable is one more way into a program: it can make the program load code (`LD_PRELOAD`,
`PYTHONPATH`, `PYTHONWARNINGS`, `QT_PLUGIN_PATH`), run a command (`BROWSER`, `PAGER`), write a file
(`XLA_FLAGS`, `CUDA_CACHE_PATH`) or connect somewhere (`DISPLAY`, `http_proxy`). Nobody can list all
such variables, so here are the ones that a file may set: those that envs and numerical libraries
need, none of which can do any of that with the values that are allowed.

To add one: read what every program that may run in a worker does with it, and allow no more values
than prove to be harmless. Paths, names of modules, plugins or drivers that are looked up in
folders, hosts, and lists of options for something else do not belong here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from envmgr.config.checks import Check, choice, named


def _pattern(allowed: str, pattern: str) -> Check:
    return named(allowed, lambda value: re.fullmatch(pattern, value, re.ASCII) is not None)


_FLAG = _pattern("0 or 1, or true or false", r"0|1|[Tt]rue|[Ff]alse|TRUE|FALSE")
_WHOLE = _pattern("a whole number", r"-?\d{1,9}")
_COUNT = _pattern("a number of threads", r"\d{1,5}")
_COUNTS = _pattern("numbers of threads, separated by commas", r"\d{1,5}(,\d{1,5}){0,7}")
_DEVICES = _pattern(
    "numbers or UUIDs of devices, separated by commas", r"[A-Za-z0-9-]*(,[A-Za-z0-9-]+){0,127}"
)
_PLATFORMS = _pattern("cpu, cuda, gpu or rocm", r"(cpu|cuda|gpu|rocm)(,(cpu|cuda|gpu|rocm)){0,3}")

HARMLESS: Mapping[str, Check] = {
    # how frames are rendered: each names a part of a library, by a word that the library knows
    "MUJOCO_GL": choice(
        *("egl", "osmesa", "glfw", "glx", "cgl", "wgl"), *("disable", "disabled", "off", "0")
    ),
    "PYOPENGL_PLATFORM": choice("egl", "osmesa", "glx", "x11", "wayland"),
    "MUJOCO_EGL_DEVICE_ID": _WHOLE,
    "EGL_DEVICE_ID": _WHOLE,
    "EGL_PLATFORM": choice("surfaceless", "device", "x11", "wayland"),
    "LIBGL_ALWAYS_SOFTWARE": _FLAG,
    "MESA_GL_VERSION_OVERRIDE": _pattern("a version, such as 3.3", r"\d\.\d(COMPAT|FC)?"),
    "SDL_VIDEODRIVER": choice("dummy", "offscreen", "x11", "wayland"),
    "SDL_AUDIODRIVER": choice("dummy", "alsa"),  # `disk` writes a file
    "PYGAME_HIDE_SUPPORT_PROMPT": _pattern("a word", r"\w{0,20}"),
    "PYGLET_HEADLESS": _FLAG,
    "QT_QPA_PLATFORM": choice("offscreen", "minimal"),  # `vnc` listens on a port
    "MPLBACKEND": choice("agg", "Agg"),  # others are modules, or serve pages
    # threads
    "OMP_NUM_THREADS": _COUNTS,
    "OMP_THREAD_LIMIT": _COUNT,
    "OMP_DYNAMIC": _FLAG,
    "OMP_WAIT_POLICY": choice("active", "passive", "ACTIVE", "PASSIVE"),
    "OMP_PROC_BIND": choice("true", "false", "close", "spread", "TRUE", "FALSE", "CLOSE", "SPREAD"),
    "KMP_BLOCKTIME": _WHOLE,
    "MKL_NUM_THREADS": _COUNT,
    "MKL_DYNAMIC": _FLAG,
    "OPENBLAS_NUM_THREADS": _COUNT,
    "GOTO_NUM_THREADS": _COUNT,
    "BLIS_NUM_THREADS": _COUNT,
    "VECLIB_MAXIMUM_THREADS": _COUNT,
    "NUMEXPR_NUM_THREADS": _COUNT,
    "NUMEXPR_MAX_THREADS": _COUNT,
    "NUMBA_NUM_THREADS": _COUNT,
    "RAYON_NUM_THREADS": _COUNT,
    "TF_NUM_INTRAOP_THREADS": _COUNT,
    "TF_NUM_INTEROP_THREADS": _COUNT,
    "TOKENIZERS_PARALLELISM": _FLAG,
    # devices, and how numerical libraries use them
    "CUDA_VISIBLE_DEVICES": _DEVICES,
    "CUDA_DEVICE_ORDER": choice("FASTEST_FIRST", "PCI_BUS_ID"),
    "CUDA_LAUNCH_BLOCKING": _FLAG,
    "HIP_VISIBLE_DEVICES": _DEVICES,
    "ROCR_VISIBLE_DEVICES": _DEVICES,
    "CUBLAS_WORKSPACE_CONFIG": _pattern("sizes, such as :4096:8", r"(:\d{1,9}:\d{1,9}){1,4}"),
    "JAX_PLATFORMS": _PLATFORMS,  # others are plugins; `tpu` asks the network
    "JAX_PLATFORM_NAME": _PLATFORMS,
    "JAX_ENABLE_X64": _FLAG,
    "XLA_PYTHON_CLIENT_PREALLOCATE": _FLAG,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _pattern("a number, such as 0.5", r"\d{0,2}\.?\d{1,6}"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": choice("default", "platform", "bfc", "cuda_async"),
    "TF_CPP_MIN_LOG_LEVEL": _pattern("a digit", r"\d"),
    "TF_ENABLE_ONEDNN_OPTS": _FLAG,
    "TF_FORCE_GPU_ALLOW_GROWTH": _FLAG,
}
"""What a config file may set each of these variables to, by name."""

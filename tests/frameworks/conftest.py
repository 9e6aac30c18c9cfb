"""What the tests of OpenEnv and TRL share."""

from __future__ import annotations

import contextlib
import os

# Before anything imports them. TRL brings pyarrow, whose allocator starts a thread when it is
# imported: the worker server imports no such module, so that each worker would, for seconds.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

with contextlib.suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread that outlives a test ...
    tqdm.tqdm.get_lock()  # ... and what stays is there before the first one

"""Builds `envmgr._hot`, where there is a compiler; all else is in setup.cfg.

`ENVMGR_PURE=1` leaves it out, as it does when envmgr runs: that makes a wheel for every platform.
"""

import os
import sys
import sysconfig

from setuptools import Extension, setup

# The limited API of 3.11 is what the module is written for; free-threaded builds have none.
HAS_LIMITED_API = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
HOT = Extension("envmgr._hot", ["envmgr/_hot.c"], optional=True, py_limited_api=True)

if HAS_LIMITED_API and os.environ.get("ENVMGR_PURE", "0") in ("", "0"):
    setup(ext_modules=[HOT], options={"bdist_wheel": {"py_limited_api": "cp311"}})
else:
    setup()

"""The list of compiled extensions; everything else about the build is in pyproject.toml."""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
DEBUG = os.environ.get("NEST_CYTHON_DEBUG", "0") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "nonecheck": False,
}
# No -march=native and no contraction to fused multiply-add: every machine must find the same plan.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-g" if DEBUG else "-g0"]

extensions = [
    Extension(f"cython_dp.{path.stem}", [f"cython_dp/{path.name}"], extra_compile_args=COMPILE_ARGS)
    for path in sorted((ROOT / "cython_dp").glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        # Cython compares file times only, so each mode keeps its own C files; none lies beside the sources.
        build_dir=f"build/cython-{'debug' if DEBUG else 'release'}",
        compiler_directives=DIRECTIVES,
    )
)

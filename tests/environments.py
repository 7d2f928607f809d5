"""Optional environments with other versions: `make env-...` builds them, tests use those that exist."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

#: Make target -> the variable that names the folder, and the folder without it.
ENVIRONMENTS = {
    "env-hydra-1.3.8": ("NEST_ENV_HYDRA138", ".venv-hydra138"),
    "env-nemo": ("NEST_ENV_NEMO", ".venv-nemo"),
    "env-megatron-0.19": ("NEST_ENV_MEGATRON019", ".venv-megatron019"),
}


def optional_python(target: str) -> Path:
    """Return the interpreter of an optional environment, whether it was built or not."""
    variable, folder = ENVIRONMENTS[target]
    return Path(os.environ.get(variable) or REPOSITORY / folder) / "bin" / "python"


def missing(target: str) -> str:
    """Return why an optional environment cannot be used, or nothing."""
    built = (optional_python(target).parent.parent / ".stamp").is_file()
    return "" if built else f"not built here: make {target}"

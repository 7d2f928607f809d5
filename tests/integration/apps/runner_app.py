"""An app behind a runner like NeMo's ``hydra_runner``: it parses arguments itself and appends overrides."""

from hydra._internal.utils import _run_hydra, get_args_parser
from task_app import write_down

#: What the runner of NeMo 1.23 to 2.7 appends: no ``.hydra`` folder, no run directory of its own.
APPENDED = ["hydra.output_subdir=null", "hydra/job_logging=stdout", "hydra.run.dir=."]


def main() -> None:
    """Run the task through Hydra with the runner's own overrides."""
    parser = get_args_parser()
    arguments = parser.parse_args()
    arguments.overrides += APPENDED
    _run_hydra(
        args=arguments, args_parser=parser, task_function=write_down, config_path=None, config_name=None
    )


if __name__ == "__main__":
    main()

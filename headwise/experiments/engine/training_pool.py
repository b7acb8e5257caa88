"""Train configurations in several processes or with an executor. Models in the store are not trained again."""

from collections.abc import Sequence
from concurrent.futures import Executor

from headwise.distributed import run_jobs_as_completed
from headwise.errors import HeadwiseError
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.train_model import train_or_load
from headwise.progress import Progress
from headwise.training import last_logged_step


def train_all(
    configs: Sequence[ExperimentConfig],
    store: ExperimentStore,
    processes: int | None = None,
    progress: Progress | None = None,
    executor: Executor | str | None = None,
) -> None:
    """Train every configuration that is not in the store. An interrupted call can be repeated and resumes."""
    pending = [config for config in dict.fromkeys(configs) if store.load_trained(config) is None]
    if not pending:
        return
    store.check_disk_space(pending)
    pending.sort(key=_estimated_cost, reverse=True)  # longest first, so that the workers finish at about the same time
    steps = sum(config.recipe.steps for config in pending)
    jobs = [(config.to_json(), str(store.folder), store.folder_of(config).name) for config in pending]

    def report_progress() -> None:
        if progress is not None:
            progress(f"training {len(pending)} models", sum(_steps_done(config, store) for config in pending), steps)

    for _ in run_jobs_as_completed(
        _train, jobs, processes, report_progress, fresh_process=True, executor=executor, folder=store.folder
    ):
        report_progress()


def _train(config_json: str, folder: str, name: str) -> None:
    config, store = ExperimentConfig.from_json(config_json), ExperimentStore(folder)
    check_unchanged(store.folder_of(config).name, name)
    train_or_load(config, store)


def check_unchanged(own_key: str, expected_key: str) -> None:
    """Raise an error if a worker computes another key, because the code or a text changed after the start."""
    if own_key != expected_key:
        raise HeadwiseError("The code or the text changed while the experiment was running. Run the command again.")


def _estimated_cost(config: ExperimentConfig) -> float:
    """Estimate the relative training time. Narrow heads are slow."""
    spec = config.spec
    return config.recipe.steps * config.recipe.batch_size * spec.layers * (spec.width + 2 * spec.attention.heads)


def _steps_done(config: ExperimentConfig, store: ExperimentStore) -> int:
    """Return the number of finished steps from the last log entry."""

    if store.load_trained(config) is not None:
        return config.recipe.steps
    return last_logged_step(store.folder_of(config))

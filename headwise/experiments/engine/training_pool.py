"""Points trained in several processes, or by any executor: what is in the store is not trained again."""

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
    """Train every point that is not in the store; stopped, and called again, it goes on with what is left."""
    pending = [config for config in dict.fromkeys(configs) if store.load_trained(config) is None]
    if not pending:
        return
    store.check_disk_space(pending)
    pending.sort(key=_estimated_cost, reverse=True)  # the longest first, so that none is left alone at the end
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
    """Whether another process names a thing as the one that began it: else the code or a text was changed meanwhile."""
    if own_key != expected_key:
        raise HeadwiseError("the code or the text was changed while the lab was at work; run the same again.")


def _estimated_cost(config: ExperimentConfig) -> float:
    """About how long a point takes: narrow heads are slow."""
    spec = config.spec
    return config.recipe.steps * config.recipe.batch_size * spec.layers * (spec.width + 2 * spec.attention.heads)


def _steps_done(config: ExperimentConfig, store: ExperimentStore) -> int:
    """How far a point is, by what it logged last."""
    if store.load_trained(config) is not None:
        return config.recipe.steps
    return last_logged_step(store.folder_of(config))

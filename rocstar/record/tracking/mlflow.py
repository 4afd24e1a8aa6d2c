"""MLflow: server and experiment are MLflow's own settings (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""

from __future__ import annotations

import time

import mlflow
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from rocstar.config.tree import flat
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.tracking.follow import state_file

PARAMETER_CHARACTERS = 500  # of a value, which MLflow refuses when longer


class MlflowSink:
    """One MLflow run for each run of ours: its id is kept beside how far it came."""

    def __init__(self, folder: RunFolder) -> None:
        id_file = state_file(folder, "mlflow").with_suffix(".id")
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text())
        else:
            run = mlflow.start_run(run_name=folder.name)
            settings = flat(read_json(folder.resolved))
            mlflow.log_params({name: str(value)[:PARAMETER_CHARACTERS] for name, value in settings})
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(run.info.run_id)
        self._client = MlflowClient()
        self._id = id_file.read_text()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        mlflow.end_run()

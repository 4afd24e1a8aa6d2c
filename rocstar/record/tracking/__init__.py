"""Metrics of a run sent to TensorBoard, W&B, trackio or MLflow by a process that only reads the run's folder: it can
neither slow a run nor fail it."""

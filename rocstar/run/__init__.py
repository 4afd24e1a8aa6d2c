"""The wiring behind `train.py`: parts built from a recipe, tasks, checkpoints, CPU accounting."""

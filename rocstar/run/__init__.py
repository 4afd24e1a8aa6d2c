"""The wiring behind `train.py`: parts made from a recipe, what a run learns, checkpoints, accounts of CPU."""
